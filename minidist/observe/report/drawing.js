"use strict";
// How the charts of the page are drawn, with Apache ECharts: texts and elements, colours and patterns, and what charts
// share. Texts of the run only ever become text nodes, or labels on a canvas. Each surface has a pattern beside its
// colour, so that the page can be read in grey.

const UNITS = [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]];
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
