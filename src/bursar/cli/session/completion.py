"""`bursar completion`."""

from __future__ import annotations

import click


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the completion script of a shell.

    \b
    bash:  echo 'eval "$(bursar completion bash)"' >> ~/.bashrc
    zsh:   echo 'eval "$(bursar completion zsh)"' >> ~/.zshrc
    fish:  bursar completion fish > ~/.config/fish/completions/bursar.fish
    """
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None, "click knows the three shells"
    click.echo(kind(ctx.find_root().command, {}, "bursar", "_BURSAR_COMPLETE").source())
