"""Lesson 02: every collective by every algorithm: its messages on the clock of the α-β model."""

from functools import cache, partial

from minidist.comm.collectives.select import ALGORITHMS
from minidist.console import size_text
from minidist.grading import load_module
from minidist.lessons import FOLDER
from minidist.simulate.cluster import Cluster
from minidist.simulate.message_times import MessageTime, message_times
from minidist.simulate.messages import Operands
from minidist.site.live import Control, Live, Picture, Prediction, Say

ELSEWHERE = ("native", "shared", "hierarchical", "torus", "torus-both")
"""Algorithms that need MPI, shared memory, or the wires of lesson 04."""

CALLS = tuple(
    (verb, name) for verb, names in ALGORITHMS.items() for name in names if name not in ELSEWHERE
)
RANKS = (2, 4, 5, 7, 8)
LENGTHS = (512, 32 << 10, 512 << 10)  # bytes of a rank's array, as in section 3.3
ITEM = 8  # bytes of a number
LEFT, TOP = 58, 34
WIDTH = 330  # of the time axis
ROW = 30
LIST = (422, 190, 34)  # the list of algorithms: left, width, height of a row


@cache
def messages_of(verb: str, algorithm: str, size: int, nbytes: int) -> list[MessageTime]:
    """Return every message of a call, with times by the links of lesson 02, section 3.3.

    Args:    nbytes: of each rank's array; in an all_to_all, of all its parts.
    """
    block = {"all_to_all": nbytes // size, "barrier": 0}.get(verb, nbytes)
    operands = Operands(block // ITEM * ITEM, itemsize=ITEM)
    links = _links(size)
    return message_times(verb, algorithm, operands, links, range(size))


@cache
def _links(size: int) -> Cluster:
    lesson = load_module(FOLDER / "02_collectives" / "lesson.py", "02")
    links: Cluster = lesson.even_links(size, **lesson.SMALL_LINK)
    return links


@cache
def seconds_of(verb: str, algorithm: str, size: int, nbytes: int) -> float:
    """Return when the last message of a call arrives."""
    return max(message.stop for message in messages_of(verb, algorithm, size, nbytes))


def figure(say: Say) -> Live:
    """Return the figure in a language."""
    return Live(
        name="families",
        lesson="02",
        section="3",
        title=say(
            "Every collective by every algorithm, message by message",
            "各种集体通信、各种算法，一条条消息看",
        ),
        predict=Prediction(
            say(
                "The all-reduce called doubling exchanges whole arrays with the rank at distance 1, "
                "then 2, then 4. For 512 B on eight ranks it takes 3 waits of 2 ms: 6 ms. How long "
                "does it take on seven ranks?",
                "doubling（倍增）全归约先后与距离 1、2、4 的 rank 交换整个数组。八个 rank、512 B 时"
                "依次等 3 次，每次 2 ms，共 6 ms。七个 rank 要多久？",
            ),
            (
                say("less than 6 ms", "不到 6 ms"),
                "6 ms",
                say("more than 6 ms", "超过 6 ms"),
            ),
            2,
            say(
                "8 ms. The exchanges fit 2^k ranks, here four. Each of the other three first gives its "
                "array to a neighbour, and gets the sum from it at the end: 2 waits more than four "
                "ranks need.",
                "要 8 ms。这种交换只适合 2^k 个 rank。多出来的 3 个 rank 先把数组交给邻居，最后再取回"
                "和，比四个 rank 多等 2 次。",
            ),
        ),
        controls=(
            Control(
                say("collective · algorithm", "原语 · 算法"),
                tuple(f"{verb} · {name}" for verb, name in CALLS),
            ),
            Control(say("ranks", "rank 数"), tuple(map(str, RANKS))),
            Control(say("array of a rank", "每个 rank 的数组"), tuple(map(size_text, LENGTHS))),
        ),
        size=(LIST[0] + LIST[1] + 8, TOP + ROW * RANKS[-1] + 26),
        picture=partial(_picture, say),
        start=(CALLS.index(("all_reduce", "doubling")), len(RANKS) - 1, 0),
    )


def _picture(say: Say, call_at: int, size_at: int, length_at: int) -> Picture:
    verb, algorithm = CALLS[call_at]
    size = RANKS[size_at]
    nbytes = LENGTHS[length_at]
    picture = Picture(_command(verb, algorithm, size, nbytes))
    messages = messages_of(verb, algorithm, size, nbytes)
    end = seconds_of(verb, algorithm, size, nbytes)
    _draw_messages(picture, messages, size, end)
    picture.text(LEFT, 18, say("time →", "时间 →"), "soft")
    _draw_list(picture, say, verb, algorithm, size, nbytes)
    sent = [sum(one.nbytes for one in messages if one.src == rank) for rank in range(size)]
    count = len(messages)
    if not sum(sent):
        picture.facts.append(
            say(f"Messages, without data: {count}.", f"{count} 条消息，都不带数据。")
        )
    else:
        whole = size_text(sum(sent))
        most = f"{size_text(max(sent))} = {max(sent) / nbytes:.3g} n"
        picture.facts.append(
            say(
                f"Messages: {count}. All ranks send {whole}, the busiest rank {most}.",
                f"{count} 条消息。所有 rank 共发送 {whole}，最忙的 rank 发送 {most}。",
            )
        )
    picture.facts.append(
        say(
            f"{1e3 * end:.1f} ms by the α–β model, with α = 2 ms, and 2 ms more for 64 KiB.",
            f"按 α–β 模型要 {1e3 * end:.1f} ms：每条消息 α = 2 ms，每 64 KiB 再加 2 ms。",
        )
    )
    return picture


def _draw_messages(picture: Picture, messages: list[MessageTime], size: int, end: float) -> None:
    """Draw a row for each rank, and each message as a line from its sender, when it leaves, to its
    receiver, when it arrives."""
    for rank in range(size):
        y = TOP + (rank + 0.5) * ROW
        picture.line([(LEFT, y), (LEFT + WIDTH, y)])
        picture.box(4, y - 10, 48, 20, f"c{rank}", f"rank {rank}")
    for message in messages:
        ends = ((message.start, message.src), (message.stop, message.dst))
        picture.line(
            [(LEFT + round(WIDTH * at / end), TOP + (rank + 0.5) * ROW) for at, rank in ends],
            f"c{message.src}",
        )
    picture.text(LEFT + WIDTH, TOP + ROW * size + 18, f"{1e3 * end:.1f} ms", "end soft")


def _draw_list(
    picture: Picture, say: Say, verb: str, algorithm: str, size: int, nbytes: int
) -> None:
    """Draw the verb's algorithms with their times, each a button."""
    x, width, row = LIST
    times = {name: seconds_of(of, name, size, nbytes) for of, name in CALLS if of == verb}
    picture.text(x, 18, say(f"{verb} by", f"{verb} 的算法"), "soft")
    for place, (name, seconds) in enumerate(times.items()):
        y = TOP + place * row
        picture.box(
            x,
            y,
            width,
            21,
            "c0" if name == algorithm else "free",
            f"{name}: {1e3 * seconds:.1f} ms",
            sets=(0, CALLS.index((verb, name))),
        )


def _command(verb: str, algorithm: str, size: int, nbytes: int) -> str:
    """Return a command: the lesson prints the times of an all-reduce."""
    if verb == "all_reduce":
        return f"minidist lesson 02 -n {size}"
    call = f"messages_of('{verb}', '{algorithm}', {size}, {nbytes})"
    return (
        'python -c "from minidist.site.live.families import messages_of; print(*'
        f"{call}, sep='\\n')\""
    )
