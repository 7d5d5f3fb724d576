"""Parts that commands share: connection options, printing, errors and exit codes, completion, manifests."""
