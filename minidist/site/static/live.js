/* Draws the live figures. A figure's numbers are in window.minidistLive[name], made by minidist when the site was
   built; here is only the drawing, the sliders, and the prediction that unlocks them. */
"use strict";
(() => {
  const SVG = "http://www.w3.org/2000/svg";
  const WORDS = document.documentElement.lang.startsWith("zh")
    ? { predict: "先猜一猜，图才会动。", right: "猜对了。", wrong: "不是。", command: "同样的数字：" }
    : { predict: "Choose an answer first: it unlocks the figure.", right: "Right.", wrong: "No.", command: "The same numbers:" };

  const make = (tag, about = {}, ...inside) => {
    const node = document.createElement(tag);
    Object.assign(node, about);
    node.append(...inside);
    return node;
  };

  const shape = (tag, about, text) => {
    const node = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(about)) node.setAttribute(name, value);
    if (text !== undefined) node.textContent = text;
    return node;
  };

  /* One shape of a picture, as minidist.site.live.Picture writes it. */
  const drawn = (one, choose) => {
    if (one[0] === "t") return [shape("text", { x: one[1], y: one[2], class: one[4] || "" }, one[3])];
    if (one[0] === "l") return [shape("polyline", { points: one[1], class: one[2] || "" })];
    const [, x, y, width, height, look, text, sets] = one;
    const nodes = [shape("rect", { x, y, width, height, rx: 2, class: look })];
    if (text) nodes.push(shape("text", { x: x + width / 2, y: y + height / 2, class: "on" }, text));
    if (sets) for (const node of nodes) {
      node.classList.add("click");
      node.addEventListener("click", () => choose(...sets));
    }
    return nodes;
  };

  const build = (figure, name) => {
    const data = window.minidistLive[name];
    const inputs = [];
    const svg = shape("svg", {
      viewBox: `0 0 ${data.size[0]} ${data.size[1]}`, role: "img",
      "aria-label": figure.querySelector("figcaption").textContent,
    });
    const facts = make("ul", { ariaLive: "polite" });
    const command = make("code");

    const show = () => {
      let place = 0;
      data.controls.forEach(([, values], i) => {
        place = place * values.length + Number(inputs[i].value);
        inputs[i].nextElementSibling.value = values[inputs[i].value];
        inputs[i].setAttribute("aria-valuetext", values[inputs[i].value]);
      });
      const [shapes, told, run] = data.pictures[place];
      svg.replaceChildren(...shapes.flatMap((at) => drawn(data.shapes[at], choose)));
      facts.replaceChildren(...told.map((fact) => make("li", {}, fact)));
      command.textContent = run;
    };
    const choose = (control, position) => {
      if (inputs[control].disabled) return;
      inputs[control].value = position;
      show();
    };

    const controls = make("div", { className: "controls locked" });
    data.controls.forEach(([label, values], i) => {
      const input = make("input", { type: "range", min: 0, max: values.length - 1, step: 1, disabled: true });
      input.value = data.start[i];
      input.addEventListener("input", show);
      inputs.push(input);
      controls.append(make("label", {}, label, input, make("output")));
    });

    const verdict = make("p", { className: "verdict", ariaLive: "polite", textContent: WORDS.predict });
    const answers = make("fieldset");
    data.choices.forEach((choice, i) => {
      const radio = make("input", { type: "radio", name: `live-${name}`, value: i });
      radio.addEventListener("change", () => {
        for (const other of answers.querySelectorAll("input")) other.disabled = true;
        for (const input of inputs) input.disabled = false;
        controls.classList.remove("locked");
        verdict.textContent = `${i === data.right ? WORDS.right : WORDS.wrong} ${data.why}`;
        inputs[0].focus();
      });
      answers.append(make("label", {}, radio, ` ${choice}`));
    });

    figure.querySelector(".still")?.remove();
    figure.append(answers, verdict, controls, make("div", { className: "picture" }, svg), facts,
      make("p", {}, `${WORDS.command} `, command));
    show();
  };

  document.addEventListener("DOMContentLoaded", () => {
    for (const figure of document.querySelectorAll("figure.live")) build(figure, figure.dataset.live);
  });
})();
