"""Chapter 25 · The report of a run: one HTML file, made from the run folder alone.

    run_files    what the folder holds, read        section     what a section is: lines, tables,
                                                                charts
    diagnosis losses exposed ranks stragglers memory traffic links joules environment: a section
    each
    steps        which recorded steps the page keeps, and their spans
    page         the sections as HTML, with report.css, the scripts and the charting library
                 (vendor/) inside
    drawing.js timeline.js report.js: how charts are drawn, the timeline, the other charts and the
    page

The page asks for nothing from anywhere: a policy in its head forbids it. Tables and lines are in
the HTML itself; charts are drawn by report.js from the numbers in the page.
"""
