"use strict";
// The charts of the page, from its numbers, after drawing.js and timeline.js. A chart is one function: it sets the option
// of its view, and is called again when a control or the colour scheme changes.

const numbers = JSON.parse(document.getElementById("numbers").textContent);
const steps = numbers.timeline ? numbers.timeline.steps : [];
const state = { step: numbers.timeline ? numbers.timeline.middle : null, memoryStep: null, memoryRank: 0, axis: "all",
                rankValue: null, ranks: null, lanes: null, arrows: true, from: 0, to: 100 };
const views = new Map();            // key -> {key, box, controls, beside, chart}
const stepSelects = [];
const DASHES = ["solid", "dashed", "dotted"];

// ------------------------------------------------------------------------------------------------ the chosen step

function stepSelect(view) {
  const options = steps.map((one) => [one.step, `${one.step} (${number(one.us / 1e3)} ms)`]);
  const [made, label] = select("step", options, state.step, (value) => chooseStep(Number(value)));
  stepSelects.push(made);
  view.controls.append(label);
}

function chooseStep(step) {
  Object.assign(state, { step, from: 0, to: 100 });
  for (const made of stepSelects) made.value = String(step);
  for (const key of ["timeline", "overlap"]) if (views.has(key)) draw[key](views.get(key), numbers[key]);
}

// ------------------------------------------------------------------------------------------------ the other charts

function stackedBars(view, categories, lengths, names, horizontal, categoryName) {
  const value = axis("value", "ms", {}), category = axis("category", categoryName, {
    data: categories, inverse: horizontal, ...(horizontal ? { nameGap: 30 } : {}) });
  const used = names.map((name, look) => ({ name, look, data: lengths.map((parts) => parts[look]) }))
    .filter((one) => one.data.some((length) => length > 0));
  show(view, { legend: legendOption(used.map((one) => one.name), "rect"), xAxis: horizontal ? value : category,
               yAxis: horizontal ? category : value, tooltip: { trigger: "axis", axisPointer: { type: "shadow" },
                                                               valueFormatter: (ms) => `${number(ms)} ms` },
               series: used.map(({ name, look, data }) => ({
                 name, type: "bar", stack: "all", data, barMaxWidth: 28,
                 itemStyle: { color: paint(look), borderColor: css("paper"), borderWidth: 0.5 } })) });
}

function overlap(view, data) {
  if (!view.ready) {
    view.ready = true;
    stepSelect(view);
  }
  const step = data.steps.find((one) => one.step === state.step);
  view.box.style.height = `${110 + 30 * data.ranks.length}px`;
  view.chart.resize();
  const lengths = step.still.map((still, place) => [Math.max(0, step.length[place] - sum(still)), ...still]);
  stackedBars(view, data.ranks, lengths, ["computing", ...data.causes], true, "rank");
  const rows = step.rows.map((row) => [row.ms.toFixed(3), row.rank, row.call,
    data.causes[row.cause] + (row.by === null ? "" : ` (rank ${row.by})`), row.where]);
  if (step.more) rows.push([step.more.toFixed(3), "", "more rows", "", ""]);
  if (rows.length) rows.push([sum(step.still.map(sum)).toFixed(3), "all", "", "", ""]);
  view.beside.replaceChildren(...(rows.length ? [table(`Where ranks stood still in step ${step.step}`,
    ["ms", "rank", "call", "cause", "asked for at"], rows, [0, 1])] : []));
}

function causes(view) {
  const data = numbers.overlap;
  stackedBars(view, data.steps.map((one) => one.step), data.steps.map((one) => [0, ...data.causes.map((_, cause) =>
    sum(one.still.map((still) => still[cause])) / one.still.length)]), ["", ...data.causes], false, "step");
}

function memoryStep(view) {
  const whole = steps.filter((one) => one.memory.some(Boolean));
  const ranks = numbers.timeline.ranks.slice(0, whole[0].memory.length);
  if (!view.ready) {
    view.ready = true;
    state.memoryStep = whole[Math.min(1, whole.length - 1)].step;
    const again = () => memoryStep(view);
    view.controls.append(
      select("step", whole.map((one) => [one.step, one.step]), state.memoryStep,
             (value) => { state.memoryStep = Number(value); again(); })[1],
      select("rank", ranks.map((rank, place) => [place, rank]), 0,
             (value) => { state.memoryRank = Number(value); again(); })[1]);
  }
  const step = whole.find((one) => one.step === state.memoryStep);
  const memory = step.memory[state.memoryRank] || { us: [0], bytes: { "not recorded": [0] } };
  areas(view, memory.us.map((us) => us / 1e3), memory.bytes, "ms from the begin of the step",
        { min: 0, max: step.us / 1e3, axisLabel: { color: css("soft"), showMaxLabel: false } });
}

function traffic(view, data) {
  const axes = Object.keys(data.cells);
  if (!view.ready) {
    view.ready = true;
    view.controls.append(select("axis", ["all", ...axes].map((name) => [name, name]), "all",
                                (value) => { state.axis = value; traffic(view, data); })[1]);
  }
  const place = new Map(data.ranks.map((rank, at) => [rank, at])), sums = new Map();
  for (const [sender, receiver, nbytes] of state.axis === "all" ? axes.flatMap((name) => data.cells[name])
    : data.cells[state.axis]) {
    const key = `${place.get(receiver)} ${place.get(sender)}`;
    sums.set(key, (sums.get(key) || 0) + nbytes);
  }
  const cells = [...sums].map(([key, nbytes]) => [...key.split(" ").map(Number), nbytes]);
  matrix(view, data.ranks, data.ranks, cells, ["to rank", "from rank"], bytesText,
         data.ranks.length <= (narrow() ? 4 : 12));
}

/** Ranks by steps; of many steps each column is a group of `every`. */
function byStep(view, data, cells, text) {
  const columns = data.steps.map((step) => data.every > 1 ? `${step}-${step + data.every - 1}` : step);
  matrix(view, columns, data.ranks, cells, [data.every > 1 ? "steps, the highest of each group" : "step", "rank"], text,
         false);
}

function stragglers(view, data) {
  const place = new Map(data.ranks.map((rank, at) => [rank, at]));
  byStep(view, data, data.cells.map(([at, rank, ms]) => [at, place.get(rank), ms]), (ms) => `${number(ms)} ms`);
}

function rankSteps(view, data) {
  const names = Object.keys(data.values);
  if (!view.ready) {
    view.ready = true;
    state.rankValue = names[0];
    view.controls.append(select("value", names.map((name) => [name, name]), names[0],
                                (value) => { state.rankValue = value; rankSteps(view, data); })[1]);
  }
  const { unit, rows } = data.values[state.rankValue];
  const cells = rows.flatMap((row, place) => row.map((value, at) => [at, place, value]))
    .filter((cell) => cell[2] !== null);
  byStep(view, data, cells, (value) => `${number(value)} ${unit}`);
}

/** A line a rank, with its name at its end. */
function rankMemory(view, data) {
  const series = data.lines.map((one, place) => ({
    ...band(`rank ${one.rank}`, one.mib, css(`c${place}`), { width: 1.8, type: DASHES[place % 3] })[0],
    endLabel: { show: true, formatter: "{a}", color: css("ink") }, labelLayout: { moveOverlap: "shiftY" } }));
  overSteps(view, "MiB", series, { grid: { right: 66 } });
}

const draw = {
  losses(view, data) {
    const line = data.validation === null ? {} : { markLine: { silent: true, symbol: "none", data: [{
      yAxis: data.validation, lineStyle: { color: css("c3"), type: "dashed", width: 1.5 },
      label: { formatter: `validation ${number(data.validation)}`, position: "insideStartTop",
               color: css("ink") } }] } };
    const each = band(data.loss.every > 1 ? "training" : "training, each step", data.loss, css("c0"),
                      { width: 1, opacity: 0.7 });
    Object.assign(each[0], line);
    const mean = data.window > 1 ? [{ ...band(`mean of the last ${data.window} steps`, data.running, css("ink"),
                                              { width: 2.2 })[0] }] : [];
    overSteps(view, "nats a token", [...each, ...mean], {});
  },
  seconds: (view, data) => overSteps(view, "ms", band("ms a step", data.ms, css("c0"), { width: 1.2 }), {}),
  timeline, overlap, causes, traffic, stragglers, rank_steps: rankSteps, rank_memory: rankMemory,
  memory: (view, data) => areas(view, data.at, data.bytes, "step", { min: "dataMin", max: "dataMax", minInterval: 1 }),
  memory_step: memoryStep,
  watts: (view, data) => overSteps(view, data.estimate ? "watts (an estimate)" : "watts",
                                   band("watts of rank 0", data.watts, css("c1"), { width: 1.2 }), {}),
};

// ------------------------------------------------------------------------------------------------ the page

function drawAll() {
  patterns = new Map();
  for (const [key, view] of views) draw[key](view, numbers[key]);
}

function begin() {
  for (const figure of document.querySelectorAll("figure[data-chart]")) {
    const [controls, box, beside] = [".controls", ".chart", ".beside"].map((name) => figure.querySelector(name));
    const view = { key: figure.dataset.chart, controls, box, beside, chart: echarts.init(box), ready: false };
    view.chart.on("finished", () => { box.dataset.drawn = "yes"; });
    views.set(view.key, view);
    new ResizeObserver(() => view.chart.resize()).observe(box);
  }
  drawAll();
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  let wasNarrow = narrow();
  window.addEventListener("resize", () => {
    if (narrow() !== wasNarrow) drawAll();
    wasNarrow = narrow();
  });
}

begin();
