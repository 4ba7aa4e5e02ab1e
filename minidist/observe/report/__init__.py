"""Chapter 25 · The report of a run: one HTML file, made only from the run folder.

    run_files    reads the contents of the folder
    section      a section: lines, tables, charts
    diagnosis, losses, exposed, ranks, stragglers, memory, traffic, links, joules, environment
                 one section each
    steps        the recorded steps that the page keeps, and their spans
    page         the sections as HTML, with report.css, the scripts and the charting library
                 (vendor/) inside
    drawing.js, timeline.js, report.js
                 drawing functions, the timeline, the other charts and the page

The page requests nothing from the network: a policy in its head forbids it. Tables and lines are in
the HTML itself; report.js draws the charts from the numbers in the page.
"""
