"""``python stranger.py ADDRESS``: a process without a place in the run that throws garbage at one of its islands.

:class:`harness.Stranger` as a program, so that it can be started inside a network namespace.
"""

import multiprocessing
import sys

from harness import _stranger_main, _throw_garbage_at


def main() -> None:
    """Say how many answers came back."""
    ours, theirs = multiprocessing.Pipe()
    _stranger_main(theirs, sys.argv[1], _throw_garbage_at)
    print(f"{len(ours.recv())} pieces of garbage were answered")


if __name__ == "__main__":
    main()
