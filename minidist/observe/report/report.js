"use strict";
// Draws the charts of the page from its numbers, with Apache ECharts. A chart is one function: it sets the option of
// its view, and is called again when a control or the colour scheme changes. Texts of the run only ever become text
// nodes, or labels on a canvas. Each surface has a pattern beside its colour, so that the page can be read in grey.

const numbers = JSON.parse(document.getElementById("numbers").textContent);
const steps = numbers.timeline ? numbers.timeline.steps : [];
const state = { step: numbers.timeline ? numbers.timeline.middle : null, memoryStep: null, memoryRank: 0, axis: "all",
                ranks: null, lanes: null, arrows: true, from: 0, to: 100 };
const views = new Map();            // key -> {key, box, controls, beside, chart}
const stepSelects = [];
const UNITS = [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]];
const SHORT = { compute: "comp", communication: "comm", messages: "send", receives: "recv", moves: "move" };
const LOOKS = ["forward", "backward", "optimizer", "stands still", "collective", "send", "receive", "move", "other"];
let patterns = new Map();

// ------------------------------------------------------------------------------------------------ texts and elements

const sum = (values) => values.reduce((total, value) => total + value, 0);
const plain = new Intl.NumberFormat("en", { maximumFractionDigits: 3 });
const number = (value) => value === null || value === undefined ? "none" : plain.format(value);

function bytesText(value) {
  const unit = UNITS.find(([, scale]) => Math.abs(value) >= scale);
  return unit ? `${number(Math.round(100 * value / unit[1]) / 100)} ${unit[0]}` : `${number(value)} B`;
}

function element(tag, attributes, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== false) made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

function tip(lines) {
  return element("div", { class: "tip" }, ...lines.filter(Boolean).map((line) => element("div", {}, line)));
}

function table(title, head, rows, right) {
  const row = (tag, cells) => element("tr", {}, ...cells.map((cell, place) =>
    element(tag, { class: right.includes(place) ? "number" : String(cell).length > 44 ? "long" : "" }, String(cell))));
  return element("div", {}, element("p", { class: "title" }, title), element("div", { class: "wide", tabindex: 0,
    role: "region", "aria-label": title }, element("table", { "aria-label": title },
    element("thead", {}, row("th", head)), element("tbody", {}, ...rows.map((cells) => row("td", cells))))));
}

function select(label, options, chosen, onChange) {
  const made = element("select", { onchange: () => onChange(made.value) }, ...options.map(([value, text]) =>
    element("option", { value, selected: String(value) === String(chosen) && "" }, text)));
  return [made, element("label", {}, label, made)];
}

// ------------------------------------------------------------------------------------------------ colours and patterns

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const narrow = () => window.innerWidth < 600;

const STROKES = [
  () => {},
  (pen) => lines(pen, [[-2, 2, 2, -2], [0, 8, 8, 0], [6, 10, 10, 6]]),
  (pen) => { for (const [x, y] of [[2, 2], [6, 6]]) pen.fillRect(x - 1, y - 1, 2, 2); },
  (pen) => lines(pen, [[0, 2, 8, 2], [0, 6, 8, 6]]),
  (pen) => lines(pen, [[-2, 6, 2, 10], [0, 0, 8, 8], [6, -2, 10, 2]]),
  (pen) => lines(pen, [[2, 0, 2, 8], [6, 0, 6, 8]]),
  (pen) => lines(pen, [[0, 4, 8, 4], [4, 0, 4, 8]]),
  (pen) => lines(pen, [[0, 0, 8, 8], [0, 8, 8, 0]]),
  (pen) => lines(pen, [[0, 4, 8, 4]]),
];

function lines(pen, ends) {
  for (const [fromX, fromY, toX, toY] of ends) {
    pen.beginPath();
    pen.moveTo(fromX, fromY);
    pen.lineTo(toX, toY);
    pen.stroke();
  }
}

function paint(look) {
  if (!patterns.has(look)) {
    const tile = element("canvas", { width: 8, height: 8 }), pen = tile.getContext("2d");
    pen.fillStyle = css(`c${look % 9}`);
    pen.fillRect(0, 0, 8, 8);
    pen.strokeStyle = pen.fillStyle = css("paper");
    pen.globalAlpha = 0.75;
    pen.lineWidth = 1.2;
    STROKES[(look + (look < 9 ? 0 : 4)) % STROKES.length](pen);     // the tenth look has the first colour again
    patterns.set(look, { image: tile, repeat: "repeat" });
  }
  return patterns.get(look);
}

function legend(names) {
  return element("ul", { class: "legend" }, ...names.map(([look, name]) => {
    const swatch = element("canvas", { width: 22, height: 12, "aria-hidden": "true" }), pen = swatch.getContext("2d");
    pen.fillStyle = pen.createPattern(paint(look).image, "repeat");
    pen.fillRect(0, 0, 22, 12);
    return element("li", {}, swatch, name);
  }));
}

// ------------------------------------------------------------------------------------------------ what charts share

function axis(type, name, more) {
  return { type, name, nameLocation: "middle", nameGap: 28, nameTextStyle: { color: css("soft") },
           axisLabel: { color: css("soft"), hideOverlap: true }, axisLine: { lineStyle: { color: css("line") } },
           splitLine: { show: type === "value", lineStyle: { color: css("line"), opacity: 0.6 } }, ...more };
}

function show(view, option) {
  view.box.dataset.drawn = "";
  view.chart.setOption({
    animation: false, textStyle: { color: css("ink"), fontFamily: "system-ui, sans-serif" },
    ...option,
    grid: { left: narrow() ? 56 : 76, right: narrow() ? 14 : 24, top: 34, bottom: 44, outerBoundsMode: "none",
            ...option.grid },
    tooltip: { confine: true, backgroundColor: css("panel"), borderColor: css("soft"),
               textStyle: { color: css("ink"), fontSize: 13 }, ...option.tooltip } }, { notMerge: true });
}

function legendOption(data, icon) {
  return { type: "scroll", top: 0, icon, itemWidth: 22, textStyle: { color: css("ink") },
           pageTextStyle: { color: css("ink") }, pageIconColor: css("accent"), data };
}

/** A line; of a thinned series also the band from its lowest to its highest values. */
function band(name, series, colour, style) {
  const at = (values) => series.at.map((place, index) => [place, values[index]]);
  const line = { name, type: "line", showSymbol: series.at.length === 1, data: at(series.mean),
                 lineStyle: { color: colour, ...style }, itemStyle: { color: colour }, z: 3 };
  if (series.every === 1) return [line];
  const hidden = { type: "line", showSymbol: false, stack: `band of ${name}`, lineStyle: { opacity: 0 }, silent: true,
                   tooltip: { show: false } };
  const height = series.high.map((high, index) => high === null ? null : high - series.low[index]);
  return [line, { ...hidden, data: at(series.low) },
          { ...hidden, data: at(height), areaStyle: { color: colour, opacity: 0.25 } }];
}

function overSteps(view, unit, series, more) {
  show(view, { legend: legendOption(series.filter((one) => one.name).map((one) => one.name)),
               xAxis: axis("value", "step", { min: "dataMin", max: "dataMax", minInterval: 1 }),
               yAxis: axis("value", unit, { scale: true, nameGap: narrow() ? 40 : 52 }),
               tooltip: { trigger: "axis", valueFormatter: number }, series, ...more });
}

/** Bytes by category as areas on each other. */
function areas(view, places, bytes, xName, ends) {
  const names = Object.keys(bytes), last = numbers.categories.length;
  const lookOfName = (name) => numbers.categories.includes(name) ? numbers.categories.indexOf(name) : last;
  names.sort((one, other) => lookOfName(one) - lookOfName(other));
  const most = Math.max(1, ...places.map((_, at) => sum(names.map((name) => bytes[name][at] || 0))));
  const interval = 2 ** Math.ceil(Math.log2(most / 5));
  show(view, {
    legend: legendOption(names, "rect"), xAxis: axis("value", xName, ends),
    yAxis: axis("value", "", { interval, max: interval * Math.ceil(most / interval),
                             axisLabel: { color: css("soft"), formatter: bytesText } }),
    tooltip: { trigger: "axis", valueFormatter: bytesText },
    series: names.map((name) => ({
      name, type: "line", stack: "all", step: "end", showSymbol: false,
      data: places.map((at, i) => [at, bytes[name][i]]),
      itemStyle: { color: paint(lookOfName(name)) }, lineStyle: { color: css(`c${lookOfName(name)}`), width: 1 },
      areaStyle: { color: paint(lookOfName(name)), opacity: 1 } })) });
}

/** A matrix in shades from light to dark; cells: [column, row, value]. */
function matrix(view, columns, rows, cells, names, text, labels) {
  view.box.style.height = `${Math.min(900, 120 + Math.max(26, Math.min(44, 500 / rows.length)) * rows.length)}px`;
  view.box.style.maxWidth = `${Math.max(320, 70 + 100 * columns.length)}px`;
  view.chart.resize();
  show(view, {
    grid: { left: 56, right: 14, top: 8, bottom: 88 },
    xAxis: axis("category", names[0], { data: columns }),
    yAxis: axis("category", names[1], { data: rows, inverse: true, nameGap: 30 }),
    visualMap: { type: "continuous", min: 0, max: Math.max(...cells.map((cell) => cell[2]), 1e-9), orient: "horizontal",
                 left: "center", bottom: 0, itemHeight: 140, itemWidth: 12, formatter: text,
                 text: [text(Math.max(...cells.map((cell) => cell[2]), 0)), text(0)],
                 textStyle: { color: css("ink") }, inRange: { color: [css("panel"), css("c0")] } },
    series: [{ type: "heatmap", data: cells, itemStyle: { borderColor: css("line"), borderWidth: 1 },
               label: { show: labels, color: css("ink"), textBorderColor: css("paper"), textBorderWidth: 3,
                        formatter: (one) => text(one.value[2]) } }],
    tooltip: { formatter: (one) => tip([`${names[1]} ${rows[one.value[1]]}, ${names[0]} ${columns[one.value[0]]}`,
                                        text(one.value[2])]) } });
}

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

/** "0-3,7" -> Set(0, 1, 2, 3, 7); "" or "all": null; undefined if it is no list of ranks. */
function ranksOf(text) {
  if (/^\s*(all)?\s*$/.test(text)) return null;
  const chosen = new Set();
  for (const part of text.split(",")) {
    const found = /^\s*(\d{1,5})(?:\s*-\s*(\d{1,5}))?\s*$/.exec(part);
    if (!found) return undefined;
    for (let rank = Number(found[1]); rank <= Number(found[2] || found[1]); rank++) chosen.add(rank);
  }
  return chosen;
}

// ------------------------------------------------------------------------------------------------ the timeline

function lookOf(kind) {
  if (kind.row === "compute") {
    if (kind.name.startsWith("wait")) return 3;
    const found = ["forward", "backward", "optimizer"].findIndex((name) => kind.name.startsWith(name));
    return found < 0 ? 8 : found;
  }
  return { communication: 4, messages: 5, receives: 6, moves: 7 }[kind.row];
}

/** What the filters show of the chosen step: {lanes: [{place of rank, lane}], bars: [[lane, ms, ms, kind, place]]}. */
function shownSpans(data) {
  const step = steps.find((one) => one.step === state.step);
  const used = new Set(steps.flatMap((one) => one.spans.flatMap((flat) =>
    flat.filter((_, at) => at % 3 === 0).map((kind) => data.kinds[kind].row))));
  const lanes = data.lanes.filter((lane) => used.has(lane) && (!state.lanes || state.lanes.has(lane)));
  const found = { lanes: [], bars: [], step, laneOf: (place, lane) => found.lanes.findIndex(
    (one) => one.place === place && one.lane === lane) };
  step.spans.forEach((flat, place) => {
    if (state.ranks && !state.ranks.has(data.ranks[place])) return;
    const first = found.lanes.length;
    found.lanes.push(...lanes.map((lane) => ({ place, lane })));
    for (let at = 0; at < flat.length; at += 3) {
      const lane = lanes.indexOf(data.kinds[flat[at]].row);
      const start = flat[at + 1], end = start + flat[at + 2];
      if (lane >= 0) found.bars.push([first + lane, start / 1e3, end / 1e3, flat[at], place]);
    }
  });
  return found;
}

function spanLines(data, bar) {
  const kind = data.kinds[bar[3]];
  return [kind.name + (kind.micro === null ? "" : `, microbatch ${kind.micro}`),
          `rank ${data.ranks[bar[4]]}, ${kind.row}`, `from ${number(bar[1])} ms, ${number(bar[2] - bar[1])} ms long`,
          kind.axis && `axis ${kind.axis}`, kind.bytes !== null && `${kind.bytes.toLocaleString("en")} bytes`,
          kind.where && `asked for at ${kind.where}`];
}

function drawBar(data) {
  return (params, api) => {
    const lane = api.value(0);
    const [left, middle] = api.coord([api.value(1), lane]), [end] = api.coord([api.value(2), lane]);
    const kind = data.kinds[api.value(3)], look = lookOf(kind);
    const height = api.size([0, 1])[1] * (look === 3 ? 0.5 : 0.84), width = Math.max(end - left, 1);
    const area = params.coordSys;
    const shape = echarts.graphic.clipRectByRect({ x: left, y: middle - height / 2, width, height }, area);
    if (!shape) return undefined;
    const bar = { type: "rect", shape,
                  style: { fill: paint(look), stroke: css("paper"), lineWidth: width > 3 ? 0.5 : 0 } };
    if (shape.width < 44) return bar;
    return { ...bar, textConfig: { position: "insideLeft", distance: 3 }, textContent: { style: {
      text: shortened(kind.name, shape.width - 12), fill: css("ink"), backgroundColor: css("paper"), padding: [0, 3],
      borderRadius: 2, fontSize: 11, lineHeight: 12, fontFamily: "system-ui, sans-serif" } } };
  };
}

/** As much of a text as fits into so many pixels, in letters of about 6.6. */
function shortened(text, width) {
  const most = Math.max(1, Math.floor(width / 6.6));
  return text.length <= most ? text : `${text.slice(0, most - 1)}…`;
}

function drawArrow(params, api) {
  const [fromX, fromY] = api.coord([api.value(1), api.value(0)]), [toX, toY] = api.coord([api.value(3), api.value(2)]);
  const style = { stroke: css("ink"), fill: css("ink"), lineWidth: 1, opacity: 0.55 };
  const turn = Math.atan2(toY - fromY, toX - fromX);
  const back = (angle) => [toX - 7 * Math.cos(turn + angle), toY - 7 * Math.sin(turn + angle)];
  return { type: "group", silent: true, children: [
    { type: "line", shape: { x1: fromX, y1: fromY, x2: toX, y2: toY }, style },
    { type: "polygon", shape: { points: [[toX, toY], back(0.4), back(-0.4)] }, style }] };
}

function arrowsOf(found) {
  return !state.arrows ? [] : found.step.arrows.map(([sender, start, receiver, end]) => [
    found.laneOf(sender, "messages"), start / 1e3, found.laneOf(receiver, "receives"), end / 1e3])
    .filter((one) => one[0] >= 0 && one[2] >= 0);
}

function timeline(view, data) {
  if (!view.ready) timelineControls(view, data);
  const found = shownSpans(data), label = ({ place, lane }) =>
    `${data.ranks[place]} ${narrow() ? SHORT[lane] : lane}`;
  view.box.style.height = `${110 + 22 * Math.max(2, found.lanes.length)}px`;
  view.chart.resize();
  show(view, {
    grid: { left: narrow() ? 56 : 124, right: 14, top: 8, bottom: 84 },
    xAxis: axis("value", "ms from the begin of the step", { min: 0, max: found.step.us / 1e3,
                                                         axisLabel: { color: css("soft"), showMaxLabel: false } }),
    yAxis: axis("category", "", { data: found.lanes.map(label), inverse: true, axisTick: { show: false },
                                  splitLine: { show: true, lineStyle: { color: css("line") } },
                                  axisLabel: { color: css("soft"), interval: 0, fontSize: 11 } }),
    dataZoom: [{ type: "inside", filterMode: "weakFilter", zoomOnMouseWheel: "ctrl", start: state.from, end: state.to },
               { type: "slider", filterMode: "weakFilter", bottom: 6, height: 22, start: state.from, end: state.to,
                 textStyle: { color: css("soft") }, labelFormatter: (value) => `${number(value)} ms` }],
    tooltip: { formatter: (one) => tip(spanLines(data, one.value)) },
    series: [{ type: "custom", name: "spans", renderItem: drawBar(data), encode: { x: [1, 2], y: 0 }, clip: true,
               data: found.bars },
             { type: "custom", name: "messages", renderItem: drawArrow, encode: { x: [1, 3], y: [0, 2] }, clip: true,
               data: arrowsOf(found) }] });
  const looks = [...new Set(found.bars.map((bar) => lookOf(data.kinds[bar[3]])))].sort();
  view.legend.replaceChildren(legend(looks.map((look) => [look, LOOKS[look]])));
  fillSpans(view, data, found);
}

function zoom(view, from, to) {
  const width = Math.min(100, Math.max(0.02, to - from)), start = Math.min(100 - width, Math.max(0, from));
  view.chart.dispatchAction({ type: "dataZoom", start, end: start + width });
}

function timelineControls(view, data) {
  view.ready = true;
  state.ranks = data.ranks.length > 16 ? new Set(data.ranks.slice(0, 16)) : null;
  stepSelect(view);
  const ranks = element("input", { type: "text", value: state.ranks ? "0-15" : "all", spellcheck: "false" });
  ranks.addEventListener("change", () => {
    const chosen = ranksOf(ranks.value);
    const none = chosen === undefined || (chosen !== null && !data.ranks.some((rank) => chosen.has(rank)));
    ranks.setAttribute("aria-invalid", String(none));
    if (none) return;
    state.ranks = chosen;
    timeline(view, data);
  });
  const checkbox = (name, change) => element("label", {}, element("input", {
    type: "checkbox", checked: "", onchange: (event) => {
      change(event.target.checked);
      timeline(view, data);
    } }), name);
  const laneBox = (lane) => checkbox(lane, (chosen) => {
    state.lanes = state.lanes || new Set(data.lanes);
    state.lanes[chosen ? "add" : "delete"](lane);
  });
  const used = data.lanes.filter((lane) => data.kinds.some((kind) => kind.row === lane));
  const arrows = checkbox("arrows", (chosen) => { state.arrows = chosen; });
  const moves = { "zoom in": () => middleZoom(0.5), "zoom out": () => middleZoom(2), "←": () => shift(-0.25),
                  "→": () => shift(0.25), "whole step": () => zoom(view, 0, 100) };
  const middleZoom = (by) => zoom(view, (state.from + state.to) / 2 - by * (state.to - state.from) / 2,
                                  (state.from + state.to) / 2 + by * (state.to - state.from) / 2);
  const shift = (by) => zoom(view, state.from + by * (state.to - state.from), state.to + by * (state.to - state.from));
  const spoken = { "←": "move left", "→": "move right" };
  const button = ([name, move]) => element("button", {
    type: "button", onclick: move, "aria-label": spoken[name] || name }, name);
  const boxes = [...used.map(laneBox), ...(used.includes("receives") ? [arrows] : [])];
  view.controls.append(element("label", {}, "ranks", ranks), element("fieldset", { "aria-label": "lanes" }, ...boxes),
                       ...Object.entries(moves).map(button));
  const keys = { "+": moves["zoom in"], "=": moves["zoom in"], "-": moves["zoom out"], ArrowLeft: moves["←"],
                 ArrowRight: moves["→"], 0: moves["whole step"] };
  view.box.addEventListener("keydown", (event) => {
    if (!keys[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    keys[event.key]();
  });
  view.chart.on("datazoom", () => {
    const now = view.chart.getOption().dataZoom[0];
    Object.assign(state, { from: now.start, to: now.end });
  });
  view.legend = element("div", {});
  view.spans = element("details", { ontoggle: () => fillSpans(view, data, shownSpans(data)) },
                       element("summary", {}, "The spans of this step as a table"), element("div", {}));
  view.beside.append(view.legend, view.spans);
}

/** The table below the timeline, when it is open. */
function fillSpans(view, data, found) {
  if (!view.spans.open) return;
  const most = 500, rows = [...found.bars].sort((one, other) => one[1] - other[1]).slice(0, most).map((bar) => {
    const kind = data.kinds[bar[3]];
    return [data.ranks[bar[4]], kind.row, kind.name, bar[1].toFixed(3), (bar[2] - bar[1]).toFixed(3), kind.axis || "",
            kind.bytes === null ? "" : kind.bytes.toLocaleString("en")];
  });
  const all = found.bars.length;
  const title = `Spans of step ${state.step}` + (all > most ? `: the first ${most} of ${all}` : "");
  view.spans.lastElementChild.replaceChildren(
    table(title, ["rank", "lane", "name", "from ms", "ms", "axis", "bytes"], rows, [0, 3, 4, 6]));
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

function stragglers(view, data) {
  const place = new Map(data.ranks.map((rank, at) => [rank, at]));
  const columns = data.steps.map((step) => data.every > 1 ? `${step}-${step + data.every - 1}` : step);
  matrix(view, columns, data.ranks, data.cells.map(([at, rank, ms]) => [at, place.get(rank), ms]),
         [data.every > 1 ? "steps, the longest of each group" : "step", "rank"], (ms) => `${number(ms)} ms`, false);
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
  timeline, overlap, causes, traffic, stragglers,
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
