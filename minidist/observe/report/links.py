"""The section on links: alpha, bandwidth and drift of each link, from the messages in the records
of steps."""

from statistics import median

from minidist.observe.link_times import link_profiles
from minidist.observe.report.run_files import STEPS, RunFiles
from minidist.observe.report.section import PlainTable, Section

MOST_ROWS = 64
HEAD = ("from rank", "to rank", "bytes", "ms", "alpha, µs", "MB/s", "drift", "messages")


def section(run: RunFiles) -> Section:
    """Return the section with the time of a message on each link, the slowest first."""
    found = Section("links", "Links, measured while training")
    if not run.records:
        found.missing.append(
            run.lacks(STEPS, "links", "minidist train writes there when messages left and arrived")
        )
        return found
    links = sorted(link_profiles(run.records).values(), key=lambda link: -link.seconds(link.large))
    if not links:
        found.lines.append(
            "No link could be measured: it takes four messages of one size or more, whose receiver "
            "waited for them. Ranks that share memory, and a single rank, send none."
        )
        return found
    usual = median(link.seconds(link.large) for link in links)
    slowest = links[0]
    found.lines += [
        f"The slowest link leads from rank {slowest.src} to rank {slowest.dst}: a message of "
        f"{slowest.large:,} bytes takes {1e3 * slowest.seconds(slowest.large):,.3g} ms there; "
        f"the middle of all {len(links)} links is {1e3 * usual:,.3g} ms.",
        "A message counts from its sending to its arrival, if the receiver waited for it, so no "
        "late rank makes a link slow. Of each size the quick quarter counts. Drift compares the "
        "newest half of the messages with the oldest.",
    ]
    if len(links) > MOST_ROWS:
        found.lines.append(f"The table has the {MOST_ROWS} slowest of {len(links)} links.")
    rows = [
        [
            str(link.src),
            str(link.dst),
            f"{link.large:,}",
            f"{1e3 * link.seconds(link.large):,.3f}",
            f"{1e6 * link.alpha:,.0f}",
            f"{1e-6 / link.beta:,.1f}" if link.beta else "not known",
            f"{link.drift:.2f}",
            f"{link.messages:,}",
        ]
        for link in links[:MOST_ROWS]
    ]
    found.tables.append(
        PlainTable(
            "A message on each link: the largest size that occurs often", HEAD, rows, range(8)
        )
    )
    return found
