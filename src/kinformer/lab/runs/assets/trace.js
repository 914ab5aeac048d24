"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const at = id => document.getElementById(id);
const state = { place: 0, head: 0, way: "from", token: 0, keys: false };

async function inflate(text) {
  const bytes = Uint8Array.from(atob(text), c => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Int16Array(await new Response(stream).arrayBuffer());
}

const percent = w => (Math.abs(w) >= 0.0995 ? (100 * w).toFixed(0) : (100 * w).toFixed(1)) + "\u202f%";
const share = (place, w) => place.implied ? w.toPrecision(3) : percent(w);
const shown = text => text === "\n" ? "\u21b5" : text === "" ? "\u00b7" : text === " " ? "\u2423" : text;
const labels = place => place.keys === "text" ? data.readings[place.reading].tokens
  : place.keys === "source" ? data.readings[0].tokens
  : Array.from({ length: place.count }, (_, i) => " " + (i + 1) + " ");

function weight(place, head, query, key) {
  const one = h => place.w[(h * place.queries + query) * place.count + key] * place.unit;
  if (head >= 0) return one(head);
  let sum = 0;
  for (let h = 0; h < place.heads.length; h++) sum += one(h);
  return sum / place.heads.length;
}

function option(parent, text, value) {
  const made = document.createElement("option");
  made.textContent = text; made.value = value;
  parent.append(made);
}

function chooseHeads() {
  const place = data.places[state.place];
  at("head").replaceChildren();
  place.heads.forEach((name, i) => option(at("head"), "" + name, i));
  if (place.heads.length > 1) option(at("head"), "mean of all", -1);
  if (state.head >= place.heads.length) state.head = 0;
  at("head").value = state.head;
  at("head").disabled = !place.heads.length;
}

function layText(id, tokens, choose) {
  const box = at(id);
  box.replaceChildren();
  box.classList.toggle("fixed", !choose);
  tokens.forEach((token, i) => {
    const made = document.createElement("span");
    made.setAttribute("role", "option");
    made.dataset.i = i;
    if (token === "\n") { made.innerHTML = "<span class=mark aria-hidden=true>\u21b5</span>\n"; made.setAttribute("aria-label", "new line"); }
    else if (token === "") { made.innerHTML = "<span class=mark>\u00b7</span>"; made.setAttribute("aria-label", "part of a character"); }
    else { made.textContent = token; if (!token.trim()) made.setAttribute("aria-label", "space"); }
    box.append(made);
  });
}

function layTexts() {
  const place = data.places[state.place], reading = data.readings[place.reading];
  at("queries-title").textContent = reading.name;
  layText("queries", reading.tokens, true);
  at("keys-part").hidden = place.keys === "text";
  if (place.keys !== "text") {
    at("keys-title").textContent = place.keys === "source" ? "Source" : "Summaries";
    layText("keys", labels(place), true);
  }
  const most = state.keys ? labels(place).length : reading.tokens.length;
  state.token = Math.min(state.token, most - 1);
}

function paint() {
  const place = data.places[state.place], self = place.keys === "text";
  const from = self ? state.way === "from" : !state.keys;
  at("way").disabled = !self;
  at("note").textContent = place.note;
  const chosen = state.keys ? at("keys") : at("queries"), other = self ? at("queries") : state.keys ? at("queries") : at("keys");
  for (const box of [at("queries"), at("keys")]) for (const span of box.children) {
    span.style.background = ""; span.tabIndex = -1; span.setAttribute("aria-selected", "false");
  }
  const spans = [...other.children];
  const weights = place.w ? spans.map((_, i) => from ? weight(place, state.head, state.token, i) : weight(place, state.head, i, state.token)) : [];
  const most = Math.max(1e-9, ...weights.map(Math.abs));
  weights.forEach((w, i) => {
    const part = 100 * Math.abs(w) / most;
    if (part > 0.5) spans[i].style.background = `color-mix(in srgb, var(--${w < 0 ? "cold" : "heat"}) ${part.toFixed(1)}%, transparent)`;
  });
  const mine = chosen.children[state.token];
  mine.setAttribute("aria-selected", "true"); mine.tabIndex = 0;
  details(place, from, weights);
  for (const button of document.querySelectorAll(".heads button"))
    button.setAttribute("aria-pressed", String(+button.dataset.place === state.place && +button.dataset.head === state.head));
}

function details(place, from, weights) {
  const reading = data.readings[place.reading], box = at("details");
  const names = from ? labels(place) : reading.tokens;
  const chosen = state.keys ? labels(place)[state.token] : reading.tokens[state.token];
  const facts = [`Token ${state.token + 1} of ${state.keys ? labels(place).length : reading.tokens.length}`];
  if (!state.keys) {
    if (reading.exits) facts.push(`left after layer ${reading.exits[state.token]}`);
    if (reading.steps) facts.push(`took ${reading.steps[state.token]} steps`);
    const head = state.head;
    if (place.buckets && head >= 0 && place.buckets[head][0][0] >= 0) facts.push(`bucket ${place.buckets[head].map(round => round[state.token]).join(", ")}`);
    if (place.spans && head >= 0) facts.push(`span ${(Array.isArray(place.spans[head]) ? place.spans[head][state.token] : place.spans[head]).toFixed(1)} tokens`);
  }
  const line = document.createElement("p"), code = document.createElement("code");
  code.textContent = shown(chosen);
  line.append(code, " " + facts.join(", ") + (weights.length ? from ? "; it looks at:" : "; those that look at it most:" : "."));
  const list = document.createElement("ol");
  weights.map((w, i) => [w, i]).filter(([w]) => Math.abs(w) > 5e-4).sort((a, b) => Math.abs(b[0]) - Math.abs(a[0])).slice(0, 12).forEach(([w, i]) => {
    const item = document.createElement("li"), name = document.createElement("code"), number = document.createElement("span");
    name.textContent = shown(names[i]); number.textContent = `${share(place, w)} (${i + 1})`;
    item.append(name, number); list.append(item);
  });
  box.replaceChildren(line, list);
}

function thumb(place, head, canvas) {
  canvas.width = place.count; canvas.height = place.queries;
  const style = getComputedStyle(document.documentElement);
  const rgb = name => { const hex = style.getPropertyValue(name).trim(); return [1, 3, 5].map(i => parseInt(hex.slice(i, i + 2), 16)); };
  const paper = rgb("--paper"), heat = rgb("--link"), cold = rgb("--cold");
  const image = new ImageData(place.count, place.queries);
  const size = place.queries * place.count;
  let most = 1;
  for (let i = 0; i < size; i++) most = Math.max(most, Math.abs(place.w[head * size + i]));
  for (let i = 0; i < size; i++) {
    const w = place.w[head * size + i], part = Math.sqrt(Math.abs(w) / most), full = w < 0 ? cold : heat;
    for (let c = 0; c < 3; c++) image.data[4 * i + c] = paper[c] + part * (full[c] - paper[c]);
    image.data[4 * i + 3] = 255;
  }
  canvas.getContext("2d").putImageData(image, 0, 0);
}

function overview() {
  const box = at("overview");
  box.replaceChildren();
  data.places.forEach((place, number) => {
    const title = document.createElement("h3"), row = document.createElement("div");
    title.textContent = place.place + (place.w ? ` (${place.mixer})` : `: ${place.note}`);
    row.className = "heads";
    if (place.w) place.heads.forEach((name, head) => {
      const button = document.createElement("button"), canvas = document.createElement("canvas");
      button.type = "button"; button.dataset.place = number; button.dataset.head = head;
      button.append(canvas, `head ${name}`);
      button.setAttribute("aria-label", `${place.place}, head ${name}`);
      button.onclick = () => { Object.assign(state, { head }); choosePlace(number); scrollTo({ top: 0 }); };
      thumb(place, head, canvas);
      row.append(button);
    });
    box.append(title, row);
  });
}

function choosePlace(number) {
  const before = data.places[state.place];
  state.place = number;
  if (before.reading !== data.places[number].reading || data.places[number].keys === "text") state.keys = false;
  at("place").value = number;
  chooseHeads(); layTexts(); paint();
}

for (const [id, keys] of [["queries", false], ["keys", true]]) {
  const pick = event => {
    const span = event.target.closest("[role=option]");
    if (!span) return;
    Object.assign(state, { token: +span.dataset.i, keys });
    paint();
    return span;
  };
  at(id).onclick = event => { const span = pick(event); if (span) span.focus(); };
  at(id).onkeydown = event => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    const most = at(id).children.length - 1;
    if (step === undefined && event.key !== "Home" && event.key !== "End") return;
    event.preventDefault();
    const token = step ? state.token + step : event.key === "Home" ? 0 : most;
    Object.assign(state, { token: Math.min(most, Math.max(0, token)), keys });
    paint();
    at(id).children[state.token].focus();
  };
}
at("place").onchange = () => choosePlace(+at("place").value);
at("head").onchange = () => { state.head = +at("head").value; paint(); };
at("way").onchange = () => { state.way = at("way").value; paint(); };
at("controls").onsubmit = event => event.preventDefault();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", overview);

(async () => {
  for (const place of data.places) if (place.weights) place.w = await inflate(place.weights);
  data.places.forEach((place, i) => option(at("place"), place.place, i));
  const first = data.places.findIndex(place => place.w);
  state.token = Math.floor(2 * data.readings[data.places[Math.max(0, first)].reading].tokens.length / 3);
  overview();
  choosePlace(Math.max(0, first));
  document.body.dataset.ready = "yes";
})();
