
// What a turn was shown after, from the turn's side; and what a decoy followed, from the context's.
const SHOWN_AFTER = ["its own conversation", "another conversation (decoy)",
  "another response to its query (decoy)"];
const FOLLOWED = [null, "decoy: followed another conversation",
  "decoy: followed another response to this query"];
const CONTEXTS = 10; // on a page

for (const button of document.querySelectorAll("figure button")) {
  button.addEventListener("click", () => {
    const close = el("button", { type: "button" }, "close");
    byId("enlarged").replaceChildren(close, button.firstElementChild.cloneNode());
    byId("enlarged").showModal();
  });
}
byId("enlarged").addEventListener("click", () => byId("enlarged").close());

unpacked().then((data) => {
  const { contexts, turns } = data;
  const count = turns.context.length;
  const several = data.runs.length > 1;
  const judges = Object.keys(turns.labels);
  const bits = turns.bits;
  const turnsOf = contexts.id.map(() => []);
  turns.context.forEach((c, i) => turnsOf[c].push(i));
  const temperature = (t) => (t === 0 ? "greedy" : `T = ${t}`);
  const upwards = (values) => [...new Set(values)].sort((a, b) => a - b);

  // -- filters: each has a control, and a test of a turn, or null where all pass ----------------
  const form = byId("filters");
  const filters = [];

  function choice(name, values, test, shown = String, first = null) {
    const distinct = [...new Set(values)];
    if (distinct.length < 2) return;
    const select = el("select", {}, el("option", { value: "" }, "all"));
    distinct.forEach((value, k) => select.append(
      el("option", { value: String(k), defaultSelected: value === first }, shown(value))));
    form.append(el("label", {}, name, select));
    filters.push(() => {
      if (select.value === "") return null;
      const wanted = distinct[Number(select.value)];
      return (i) => test(i) === wanted;
    });
  }

  const words = (category) => category.replaceAll("_", " ");
  const byJudge = (judge) => (judges.length > 1 ? ` by ${judge}` : "");
  const ofContext = (column) => (i) => contexts[column][turns.context[i]];
  const search = el("input", { type: "search" });
  form.append(el("label", {}, "text of turn or context", search));
  for (const judge of judges) {
    const codes = turns.labels[judge].category;
    choice(`category${byJudge(judge)}`, upwards(codes), (i) => codes[i], (k) => words(data.categories[k]));
  }
  choice("temperature", upwards(turns.temperature), (i) => turns.temperature[i], temperature);
  choice("run", contexts.run, ofContext("run"), (k) => data.runs[k]);
  choice("dataset", upwards(contexts.dataset), ofContext("dataset"), (k) => data.datasets[k]);
  choice("response", upwards(contexts.response_index.filter((k) => k !== null)), ofContext("response_index"));
  for (const judge of judges) {
    for (const outcome of ["grounded", "dependent"]) {
      const values = turns.labels[judge][outcome] || [];
      choice(`genuine and ${outcome}${byJudge(judge)}`, [1, 0].filter((value) => values.includes(value)),
        (i) => values[i], (value) => (value ? "yes" : "no"));
    }
  }
  choice("shown after", upwards(turns.decoy), (i) => turns.decoy[i], (k) => SHOWN_AFTER[k], 0);
  for (const [name, beyond] of [["bits from", (b, v) => b >= v], ["bits to", (b, v) => b <= v]]) {
    if (!bits) break;
    const input = el("input", { type: "number", step: "0.1" });
    form.append(el("label", {}, name, input));
    filters.push(() => {
      if (input.value === "") return null;
      const limit = Number(input.value);
      return (i) => bits[i] !== null && beyond(bits[i], limit);
    });
  }
  let lower = null; // made when first searched
  filters.push(() => {
    const wanted = search.value.trim().toLowerCase();
    if (wanted === "") return null;
    lower = lower || {
      turns: turns.text.map((text) => text.toLowerCase()),
      contexts: contexts.query.map((text, c) => `${text}\n${contexts.response[c]}`.toLowerCase()),
    };
    const inContext = lower.contexts.map((text) => text.includes(wanted));
    return (i) => inContext[turns.context[i]] || lower.turns[i].includes(wanted);
  });

  // Tokens are shaded by a value; `most` is that of the darkest.
  const shadings = { nothing: null };
  if (turns.token_bits) shadings["bits about the response"] = (i) => [turns.token_bits[i], "--bits", 3];
  if (turns.logprobs && turns.pieces.some((pieces) => pieces)) {
    shadings["how unlikely they were"] = (i) =>
      [turns.logprobs[i] && turns.logprobs[i].map((p) => -p), "--odd", 8];
  }
  const shading = el("select", {}, ...Object.keys(shadings).map((name) =>
    el("option", { value: name, defaultSelected: name.startsWith("bits") }, name)));
  if (shading.length > 1) form.append(el("label", {}, "shade tokens by", shading));
  form.append(el("button", { type: "button", onclick: () => { form.reset(); filter(); } }, "clear"));

  // -- one context with its turns ---------------------------------------------------------------
  function text(content, name) {
    return el("div", { class: "text", dir: "auto", role: "group", "aria-label": name }, content || "(empty)");
  }

  function shaded(i) {
    const [values, colour, most] = shadings[shading.value] ? shadings[shading.value](i) : [];
    const pieces = turns.pieces[i];
    if (!pieces || !values) return text(turns.text[i], "user turn");
    const shown = text(" ", "user turn");
    let from = 0;
    shown.replaceChildren(...pieces.map((length, k) => {
      const value = values[k] || 0;
      const token = el("span", { title: value.toFixed(2) }, turns.text[i].slice(from, from + length));
      const share = Math.min(1, Math.abs(value) / most) * 0.55;
      token.style.backgroundColor = `rgba(var(${value < 0 && colour === "--bits" ? "--odd" : colour}), ${share})`;
      from += length;
      return token;
    }), turns.text[i].slice(from));
    return shown;
  }

  function turn(i) {
    const why = [];
    const labels = judges.map((judge) => {
      const { category, reason } = turns.labels[judge];
      const name = data.categories[category[i]];
      const accepted = data.accepted.includes(name);
      if (reason[i]) why.push(judges.length > 1 ? `${judge}: ${reason[i]}` : reason[i]);
      return el("span", { class: accepted ? "accepted" : "" },
        `${accepted ? "✓ " : ""}${words(name)}${byJudge(judge)}`);
    });
    if (turns.decoy[i]) labels.push(FOLLOWED[turns.decoy[i]]);
    if (bits && bits[i] !== null) labels.push(`${bits[i].toFixed(2)} bits`);
    if (turns.logprob[i] !== null) why.push(`log p ${turns.logprob[i].toFixed(1)} at T = 1`);
    const line = labels.flatMap((part, k) => (k ? [" · ", part] : [part]));
    if (why.length) line.push(el("span", { class: "why" }, judges.length ? "why" : "more"));
    return el("div", { class: turns.decoy[i] ? "turn decoy" : "turn" }, shaded(i), why.length
      ? el("details", { class: "meta" }, el("summary", {}, ...line), ...why.map((part) => el("p", {}, part)))
      : el("div", { class: "meta" }, ...line));
  }

  function columns(indices) {
    return el("div", { class: "columns" }, ...upwards(indices.map((i) => turns.temperature[i])).map((t) =>
      el("div", {}, el("h4", {}, temperature(t)), ...indices.filter((i) => turns.temperature[i] === t).map(turn))));
  }

  // Turns that are made elements when they are first looked at.
  function folded(title, indices) {
    if (indices.length === 0) return [];
    const fold = el("details", {}, el("summary", {}, `${indices.length} ${title}`));
    fold.addEventListener("toggle", () => { fold.append(columns(indices)); makeReachable(fold); }, { once: true });
    return [fold];
  }

  function row(c) {
    const shown = [], others = [], decoys = [];
    for (const i of turnsOf[c]) (passes[i] ? shown : turns.decoy[i] ? decoys : others).push(i);
    const place = new URLSearchParams({ context: contexts.id[c], ...(several && { run: contexts.run[c] }) });
    const about = [data.datasets[contexts.dataset[c]]];
    if (contexts.response_index[c] !== null) about.push(`response ${contexts.response_index[c]}`);
    if (contexts.unfinished[c]) about.push("unfinished");
    for (const [name, values] of Object.entries(contexts.probes)) {
      if (values[c] !== null) about.push(`${name} predicts ${values[c].toFixed(2)}`);
    }
    return el("article", { class: "context", tabindex: "-1", "aria-label": contexts.id[c] },
      el("div", { class: "before" },
        el("h3", {}, el("a", { href: `#${place}` },
          (several ? `${data.runs[contexts.run[c]]}: ` : "") + contexts.id[c])),
        el("p", { class: "meta" }, about.join(" · ")),
        el("h4", {}, "query"), text(contexts.query[c], "query"),
        el("h4", {}, "response"), text(contexts.response[c], "response")),
      el("div", {}, columns(shown), ...folded("other turns", others),
        ...folded("decoys: turns that did not follow this, as judges were shown them", decoys)));
  }

  // What scrolls can be reached by keyboard.
  function makeReachable(part) {
    const boxes = [...part.querySelectorAll(".text")].filter((box) => box.scrollHeight > box.clientHeight);
    for (const box of boxes) box.tabIndex = 0;
  }

  // -- the rows: a page of contexts with a turn that passes -------------------------------------
  const rows = byId("rows");
  const passes = new Uint8Array(count);
  let found = [];
  let first = 0;

  function draw() {
    const shown = found.slice(first, first + CONTEXTS);
    rows.replaceChildren(...(shown.length ? shown.map(row) : [el("p", {}, "No turn passes these filters.")]));
    makeReachable(rows);
    byId("previous").disabled = first === 0;
    byId("next").disabled = first + CONTEXTS >= found.length;
    const number = (n) => n.toLocaleString("en");
    const turnsFound = passes.reduce((sum, pass) => sum + pass, 0);
    byId("count").textContent = (shown.length ? `${number(first + 1)}–${number(first + shown.length)} of ` : "")
      + `${number(found.length)} contexts, ${number(turnsFound)} turns`;
  }

  function filter() {
    const tests = filters.map((make) => make()).filter((test) => test !== null);
    const hit = new Uint8Array(contexts.id.length);
    for (let i = 0; i < count; i++) {
      passes[i] = tests.every((test) => test(i)) ? 1 : 0;
      if (passes[i]) hit[turns.context[i]] = 1;
    }
    found = [];
    hit.forEach((one, c) => { if (one) found.push(c); });
    first = 0;
    draw();
  }

  function turned(by) {
    first += by;
    draw();
    rows.scrollIntoView();
  }

  // An address that names a context.
  function follow() {
    const place = new URLSearchParams(location.hash.slice(1));
    if (!place.has("context")) return;
    const run = Number(place.get("run") || 0);
    const c = contexts.id.findIndex((id, k) => id === place.get("context") && contexts.run[k] === run);
    if (c >= 0 && !found.includes(c)) {
      form.reset();
      filter();
    }
    const k = found.indexOf(c);
    if (k < 0) {
      byId("count").textContent = "This page has no such context.";
      return;
    }
    first = k - (k % CONTEXTS);
    draw();
    rows.children[k - first].scrollIntoView();
    rows.children[k - first].focus({ preventScroll: true });
  }

  form.addEventListener("input", (event) => (event.target === shading ? draw() : filter()));
  form.addEventListener("submit", (event) => event.preventDefault());
  byId("previous").addEventListener("click", () => turned(-CONTEXTS));
  byId("next").addEventListener("click", () => turned(CONTEXTS));
  window.addEventListener("hashchange", follow);
  filter();
  follow();
});
