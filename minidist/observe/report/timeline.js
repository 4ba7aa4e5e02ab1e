"use strict";
// The timeline of the chosen step: a band a rank with a lane each for compute, communication, messages and moves; zoom,
// filters, arrows from a send to its receive, and the same as a table.

const SHORT = { compute: "comp", communication: "comm", messages: "send", receives: "recv", moves: "move" };
const LOOKS = ["forward", "backward", "optimizer", "stands still", "collective", "send", "receive", "move", "other"];

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
