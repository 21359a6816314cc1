"""The figures of the documentation: the path of a request, turns, the decode batch, and curves of real runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from scripts.docsite.drawing import COLOURS, Drawing, chart

Rows = Sequence[Mapping[str, Any]]

USERS = {"ada": COLOURS[0], "bob": COLOURS[1], "cleo": COLOURS[2]}
TOKEN_BUDGET = 2048


def draw(recorded: Mapping[str, Rows], runs: Mapping[str, Rows]) -> dict[str, str]:
    """Returns the SVG of every figure by file name."""
    return {
        "request.svg": request_path(),
        "turns.svg": turns(recorded["turns"]),
        "batching.svg": batching(recorded["batching"]),
        "sft.svg": sft_curves(runs),
        "grpo.svg": grpo_curve(runs["grpo"]),
    }


def request_path() -> str:
    """Draws the path of a forward_backward from the call to its result."""
    drawing = Drawing(
        760,
        452,
        "The path of a request",
        "A forward_backward call goes from your thread to the background loop, over a transport to the server, into the journal on "
        "disk, through the scheduler of the engine loop to a lane, and its result comes back the same way.",
    )
    columns = ["your thread", "background loop", "server", "engine loop", "disk"]
    positions = [80 + 150 * number for number in range(5)]
    for number, (name, x) in enumerate(zip(columns, positions, strict=True)):
        drawing.box(x - 66, 12, 132, 26, fill=COLOURS[(0, 0, 3, 3, 2)[number]], radius=6)
        drawing.text(x, 29, name, size=12.5, anchor="middle", bold=True, fill="#ffffff")
        drawing.line([(x, 38), (x, 440)], dashed=True, width=0.8)
    steps = [
        (0, 1, "forward_backward(): validate, chunk, number", "1"),
        (1, 0, "returns an APIFuture immediately", "2"),
        (1, 2, "protobuf, over HTTP or in process; retries", "3·4"),
        (2, 4, "authenticate, validate; into the journal", "5"),
        (2, 1, "request id; the client polls", "5"),
        (2, 3, "parked until its number is next", "6"),
        (3, 3, "a lane runs one packed pass of all ready runs", "7·8"),
        (3, 4, "result and turn, in one commit", "9"),
        (3, 2, "notifies waiting polls", "9"),
        (2, 1, "the result", "10"),
        (1, 0, "result() returns", "10"),
    ]
    for row, (start, end, label, number) in enumerate(steps):
        y = 74 + row * 34
        x0, x1 = positions[start], positions[end]
        if start == end:
            drawing.line([(x0, y - 8), (x0 + 30, y - 8), (x0 + 30, y + 6), (x0 + 3, y + 6)], arrow=True)
            drawing.text(x0 - 14, y, label, size=11.5, anchor="end")
            drawing.text(x0 + 38, y + 3, number, size=11, soft=True)
            continue
        drawing.line([(x0, y), (x1, y)], arrow=True, width=1.4)
        middle, side = (x0 + x1) / 2, min(x0, x1)
        if abs(end - start) > 1:
            drawing.text(middle, y - 6, label, size=11.5, anchor="middle")
        elif start == 0 or (end == 0):
            drawing.text(max(x0, x1) + 10, y + 4, label, size=11.5)
        else:
            drawing.text(max(x0, x1) + 10, y + 4, label, size=11.5) if max(start, end) < 4 else drawing.text(
                side - 10, y + 4, label, size=11.5, anchor="end"
            )
        drawing.text((x0 + x1) / 2, y + 13, number, size=10.5, soft=True, anchor="middle")
    return drawing.svg()


def turns(recorded: Rows) -> str:
    """Draws passes as stacks of operations, coloured by user."""
    drawing = Drawing(
        760,
        300,
        "Fair scheduling",
        "Each column is one turn of the engine. Operations of several users share a pass up to 2,048 tokens; the user served least "
        "comes first; an optimizer step runs alone.",
    )
    left, base, height, width = 62, 240, 180, 680 / len(recorded)
    for tokens in (0, 512, 1024, 1536, 2048):
        y = base - tokens / TOKEN_BUDGET * height
        drawing.line([(left, y), (750, y)], width=0.5)
        drawing.text(left - 8, y + 4, f"{tokens:,}", size=11, soft=True, anchor="end")
    drawing.text(14, 40, "tokens in the pass", size=11.5, soft=True)
    for number, turn in enumerate(recorded):
        x, y = left + 8 + number * width, float(base)
        for user, kind, num_tokens in turn["operations"]:
            bar = max(num_tokens / TOKEN_BUDGET * height, 9)
            drawing.box(
                x,
                y - bar + 1,
                width - 10,
                bar - 2,
                fill=USERS[user],
                radius=3,
                tip=f"{user}: {kind}, {num_tokens} tokens",
            )
            if not num_tokens:
                drawing.text(x + (width - 10) / 2, y - bar - 4, "step", size=10, soft=True, anchor="middle")
            y -= bar
        drawing.text(x + (width - 10) / 2, base + 17, str(number + 1), size=11, soft=True, anchor="middle")
    drawing.text(
        left + 8 + len(recorded) * width / 2, base + 35, "turn", size=11.5, soft=True, anchor="middle"
    )
    for number, (user, label) in enumerate(
        {"ada": "Ada: a backlog", "bob": "Bob: small steps", "cleo": "Cleo: from turn 5"}.items()
    ):
        drawing.box(190 + number * 180, 14, 13, 13, fill=USERS[user], radius=3)
        drawing.text(209 + number * 180, 25, label, size=12)
    return drawing.svg()


def batching(recorded: Rows) -> str:
    """Draws requests as rows over steps: waiting, and one cell per token."""
    last = max(max(request["sampled"]) for request in recorded) + 1
    cell, row, left, top = 660 / last, 22, 86, 52
    drawing = Drawing(
        760,
        top + row * len(recorded) + 46,
        "Continuous batching",
        "Nine requests share four slots of the decode batch. A request joins as soon as a slot is free and leaves after its last token; "
        "no request waits for the longest one.",
    )
    drawing.box(left, 14, 13, 13, fill=COLOURS[0], radius=3)
    drawing.text(left + 19, 25, "a token", size=12)
    drawing.box(left + 100, 14, 13, 13, radius=3)
    drawing.text(left + 119, 25, "waits for a slot, or prefills its prompt", size=12)
    for number, request in enumerate(recorded):
        y = top + number * row
        drawing.text(left - 10, y + 14, f"request {number + 1}", size=11.5, anchor="end")
        first, end = request["sampled"][0], request["sampled"][-1] + 1
        if first > request["arrives"]:
            wait = (first - request["arrives"]) * cell
            drawing.box(left + request["arrives"] * cell, y + 3, wait - 1, row - 6, radius=3)
        for step in request["sampled"]:
            drawing.box(left + step * cell, y + 3, cell - 1, row - 6, fill=COLOURS[number % 4], radius=2)
        drawing.text(left + end * cell + 5, y + 15, str(len(request["sampled"])), size=10.5, soft=True)
    below = top + row * len(recorded)
    for step in range(0, last, 5):
        drawing.text(left + (step + 0.5) * cell, below + 16, str(step), size=11, soft=True, anchor="middle")
    drawing.text(left + last * cell / 2, below + 34, "sampler step", size=11.5, soft=True, anchor="middle")
    return drawing.svg()


def sft_curves(runs: Mapping[str, Rows]) -> str:
    """Draws training and evaluation losses of three learning rates."""
    drawing = Drawing(
        760,
        320,
        "Loss per answer token over 20 steps",
        "Three learning rates on sixteen examples. 0.001 falls fastest, 0.0003 ends as low, 0.0001 is still falling after 20 steps.",
    )
    scale_x, scale_y = chart(
        drawing,
        (56, 44, 560, 222),
        (1, 20, 0, 5),
        ("step", "loss per answer token"),
        ([1, 4, 8, 12, 16, 20], [0, 1, 2, 3, 4, 5]),
    )
    for colour, name in zip(COLOURS, ("sft-1e-3", "sft-3e-4", "sft-1e-4"), strict=False):
        rows = runs[name]
        points = [(scale_x(row["step"]), scale_y(row["loss"])) for row in rows if "loss" in row]
        drawing.line(points, stroke=colour, width=2)
        for row in rows:
            if row.get("eval_loss") is not None and row["step"]:
                drawing.dot(scale_x(row["step"]), scale_y(row["eval_loss"]), 4, colour)
    for number, (name, label) in enumerate(
        {"1e-3": "rate 1e-3", "3e-4": "rate 3e-4", "1e-4": "rate 1e-4"}.items()
    ):
        final = runs[f"sft-{name}"]
        final_loss = [row["eval_loss"] for row in final if row.get("eval_loss") is not None][-1]
        drawing.line([(632, 66 + 44 * number), (654, 66 + 44 * number)], stroke=COLOURS[number], width=3)
        drawing.text(660, 70 + 44 * number, label, size=12)
        drawing.text(660, 86 + 44 * number, f"final: {final_loss:.2f}", size=11, soft=True)
    drawing.dot(638, 212, 4, "#8b949e")
    drawing.text(650, 216, "held-out examples", size=11, soft=True)
    return drawing.svg()


def grpo_curve(rows: Rows) -> str:
    """Draws the mean reward of each step, and that of held-out prompts."""
    drawing = Drawing(
        760,
        300,
        "Mean reward over 30 steps of GRPO",
        "The mean reward of the sampled answers rises, and so does that of greedy answers to held-out prompts.",
    )
    scale_x, scale_y = chart(
        drawing,
        (56, 44, 560, 202),
        (0, 30, 0, 1),
        ("step", "mean reward"),
        ([0, 5, 10, 15, 20, 25, 30], [0, 0.25, 0.5, 0.75, 1]),
    )
    sampled = [(scale_x(row["step"]), scale_y(row["reward"])) for row in rows if "reward" in row]
    drawing.line(sampled, stroke=COLOURS[0], width=2)
    evaluated = [
        (scale_x(row["step"]), scale_y(row["eval_reward"]))
        for row in rows
        if row.get("eval_reward") is not None
    ]
    drawing.line(evaluated, stroke=COLOURS[1], width=1.4, dashed=True)
    for x, y in evaluated:
        drawing.dot(x, y, 4, COLOURS[1])
    drawing.line([(632, 66), (654, 66)], stroke=COLOURS[0], width=3)
    drawing.text(660, 70, "sampled answers", size=12)
    drawing.dot(643, 96, 4, COLOURS[1])
    drawing.text(660, 100, "held-out prompts", size=12)
    return drawing.svg()
