"""One order of all streams: messages are sent before they are received, updates are started last."""

from __future__ import annotations

from autopar.streams.instructions import Recv, Run, Send
from autopar.streams.order import merged


def run(program, stage):
    return Run(program, stage, 0)


STREAMS = {
    0: (run("0/F", 0), Send((0,), 1, 0), Recv((3,), 1, 1), run("0/B", 0), run("0/U", 0)),
    1: (Recv((1,), 0, 0), run("1/F", 1), run("1/B", 1), Send((2,), 0, 1), run("1/U", 1)),
}


def names(order):
    return [i.program if isinstance(i, Run) else type(i).__name__ for _, i in order]


def test_messages_and_turns():
    assert names(merged(STREAMS)) == ["0/F", "Send", "Recv", "1/F", "1/B", "Send", "Recv", "0/B", "1/U", "0/U"]


def test_updates_last():
    order = merged(STREAMS, {"0/U", "1/U"})
    assert names(order)[-2:] == ["0/U", "1/U"] and len(order) == 10
    assert sorted(map(id, (i for _, i in order))) == sorted(id(i) for s in STREAMS.values() for i in s)


def test_a_message_crosses_while_others_run():
    """XLA's CPU client runs one program of several devices at a time: one that waits for its message would hold up the rest."""
    streams = {
        0: (run("0/F0", 0), Send((0,), 1, 0), run("0/F1", 0), Send((1,), 1, 1)),
        1: (Recv((2,), 0, 0), run("1/F0", 1), Recv((3,), 0, 1), run("1/F1", 1)),
    }
    order = names(merged(streams))
    assert order == ["0/F0", "Send", "0/F1", "Send", "Recv", "1/F0", "Recv", "1/F1"]
