"use strict";
// Charts: Vega draws each description; `ast` interprets its expressions instead of running them as code.
for (const source of document.querySelectorAll("script.spec")) {
  const options = { actions: false, ast: true, renderer: "svg" };
  try {
    const spec = JSON.parse(source.textContent);
    if (innerWidth < 640) spec.config.legend.columns = 1;
    window.vegaEmbed(source.previousElementSibling, spec, options);
  } catch (error) {
    source.previousElementSibling.textContent = `This chart cannot be drawn: ${error.message}`;
  }
}
// Attention maps: teacher and students side by side. One byte is 255 times the root of a probability.
(() => {
  const source = document.getElementById("maps-data");
  if (!source) return;
  const data = JSON.parse(source.textContent);
  const bytes = Uint8Array.from(atob(data.blob), (char) => char.charCodeAt(0));
  const byId = (id) => document.getElementById(id);
  const [exampleBox, kindBox, headBox] = ["example", "kind", "head"].map(byId);
  const MARGIN = 76;
  const SIZE = 296;
  let cursor = { row: 0, column: 0 };
  let panels = [];

  const example = () => data.examples[exampleBox.selectedIndex];
  const shown = () => example().tokens.length;
  const fill = (box, labels) => box.replaceChildren(...labels.map((label) => new Option(label)));

  function probability(panel, row, column) {
    const head = headBox.selectedIndex;
    if (head >= panel.model.heads) return null;
    const start = panel.model.offsets[kindBox.value];
    const map = panel.layerBox.selectedIndex * panel.model.heads + head;
    return (bytes[start + (map * shown() + row) * shown() + column] / 255) ** 2;
  }

  // All maps share one scale, so that shades can be compared: the greatest entry of the teacher's is full ink.
  function greatest() {
    let found = 0;
    for (let row = 0; row < shown(); row++) {
      for (let column = 0; column < shown(); column++) {
        found = Math.max(found, probability(panels[0], row, column) ?? 0);
      }
    }
    return found || 1;
  }

  function draw(panel, full) {
    const style = getComputedStyle(document.documentElement);
    const ink = style.getPropertyValue("--ink");
    const scale = window.devicePixelRatio || 1;
    const cell = SIZE / shown();
    panel.canvas.width = panel.canvas.height = (MARGIN + SIZE) * scale;
    panel.canvas.style.width = panel.canvas.style.height = `${MARGIN + SIZE}px`;
    const context = panel.canvas.getContext("2d");
    context.scale(scale, scale);
    context.fillStyle = ink;
    for (let row = 0; row < shown(); row++) {
      for (let column = 0; column < shown(); column++) {
        const value = probability(panel, row, column);
        if (value === null) continue;
        context.globalAlpha = Math.min(1, Math.sqrt(value / full));
        context.fillRect(MARGIN + column * cell, MARGIN + row * cell, cell, cell);
      }
    }
    context.globalAlpha = 1;
    labels(context, cell);
    context.strokeStyle = style.getPropertyValue("--line");
    context.strokeRect(MARGIN, MARGIN, SIZE, SIZE);
    context.strokeStyle = style.getPropertyValue("--mark");
    context.lineWidth = 2;
    context.strokeRect(MARGIN + cursor.column * cell, MARGIN + cursor.row * cell, cell, cell);
  }

  function labels(context, cell) {
    const size = Math.max(7, Math.min(11, cell));
    const every = Math.ceil(size / cell);
    context.font = `${size}px system-ui, sans-serif`;
    context.textBaseline = "middle";
    for (let at = 0; at < shown(); at += every) {
      const token = example().tokens[at].slice(0, 12);
      context.textAlign = "right";
      context.fillText(token, MARGIN - 4, MARGIN + (at + 0.5) * cell, MARGIN - 6);
      context.save();
      context.translate(MARGIN + (at + 0.5) * cell, MARGIN - 4);
      context.rotate(-Math.PI / 2);
      context.textAlign = "left";
      context.fillText(token, 0, 0, MARGIN - 6);
      context.restore();
    }
  }

  function tell() {
    const { row, column } = cursor;
    const [from, to] = [example().tokens[row], example().tokens[column]];
    const values = panels.map((panel) => {
      const value = probability(panel, row, column);
      return `${panel.model.name}: ${value === null ? "no such head" : value.toFixed(3)}`;
    });
    byId("readout").textContent = `row ${row} “${from}” on column ${column} “${to}” - ${values.join("; ")}`;
  }

  function refresh() {
    const full = greatest();
    panels.forEach((panel) => draw(panel, full));
    byId("scale").textContent = `The strongest shade is a probability of ${full.toFixed(3)} or more, half that shade is a quarter of that probability.`;
    tell();
  }

  function move(row, column) {
    const clamp = (value) => Math.max(0, Math.min(shown() - 1, value));
    const next = { row: clamp(row), column: clamp(column) };
    if (next.row === cursor.row && next.column === cursor.column) return;
    cursor = next;
    refresh();
  }

  const STEPS = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };

  function makePanel(model, number) {
    const canvas = document.createElement("canvas");
    canvas.tabIndex = 0;
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", `map of ${model.name}; arrow keys choose a cell`);
    const layerBox = document.createElement("select");
    layerBox.id = `layer-${number}`;
    fill(layerBox, model.layers.map(String));
    layerBox.selectedIndex = model.layers.length - 1;
    layerBox.addEventListener("change", refresh);
    canvas.addEventListener("mousemove", (event) => {
      const cell = SIZE / shown();
      const place = [event.offsetY, event.offsetX].map((at) => Math.floor((at - MARGIN) / cell));
      if (Math.min(...place) >= 0) move(...place);
    });
    canvas.addEventListener("keydown", (event) => {
      const step = STEPS[event.key];
      if (!step) return;
      event.preventDefault();
      move(cursor.row + step[0], cursor.column + step[1]);
    });
    const name = document.createElement("h3");
    name.textContent = model.name;
    const note = document.createElement("p");
    note.textContent = model.note;
    const label = document.createElement("label");
    label.append("layer ", layerBox);
    const box = document.createElement("div");
    box.className = "panel";
    box.append(name, note, label, canvas);
    byId("panels").append(box);
    return { model, layerBox, canvas };
  }

  function showExample() {
    const found = example();
    const chosen = panels.map((panel) => panel.layerBox.selectedIndex);
    byId("panels").replaceChildren();
    panels = found.models.map(makePanel);
    panels.forEach((panel, number) => {
      if (chosen[number] < panel.model.layers.length) panel.layerBox.selectedIndex = chosen[number];
    });
    const head = Math.max(0, headBox.selectedIndex);
    const heads = Math.max(...found.models.map((model) => model.heads));
    fill(headBox, Array.from({ length: heads }, (_, number) => String(number)));
    headBox.selectedIndex = Math.min(head, heads - 1);
    byId("shown").textContent =
      found.tokens.length < found.length
        ? `The first ${found.tokens.length} of ${found.length} positions; rows go on beyond what is shown.`
        : `All ${found.length} positions.`;
    cursor = { row: 0, column: 0 };
    refresh();
  }

  fill(exampleBox, data.examples.map((one) => one.label));
  fill(kindBox, data.kinds);
  exampleBox.addEventListener("change", showExample);
  kindBox.addEventListener("change", refresh);
  headBox.addEventListener("change", refresh);
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", refresh);
  showExample();
})();
