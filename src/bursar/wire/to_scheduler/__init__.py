"""From stored documents to what the scheduler decides on."""
