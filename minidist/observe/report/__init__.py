"""Chapter 25 · The report of a run: one HTML file, made from the run folder alone.

    run_files    what the folder holds, read        section     what a section is: lines, tables, charts
    losses memory traffic exposed stragglers joules environment: a section each
    steps        which recorded steps the page keeps, and their spans
    page         the sections as HTML, with report.css, report.js and the charting library (vendor/) inside

The page asks for nothing from anywhere: a policy in its head forbids it. Tables and lines are in the HTML itself;
charts are drawn by report.js from the numbers in the page.
"""
