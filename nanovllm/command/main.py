"""The entry point; it sets what Ctrl-C does before anything else is imported."""

from nanovllm.command import interrupts


def main(argv: "list[str] | None" = None) -> int:
    """Run the command; return its status. Without `argv`, the process is that of the command."""
    if argv is None:
        interrupts.take_over()
    from nanovllm.command.guard import prepare_streams, run_guarded
    from nanovllm.command.parser import make_parser

    prepare_streams()
    args = make_parser().parse_args(argv)
    return run_guarded(args.run, args)
