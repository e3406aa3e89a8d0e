
const AFTER = ["its own conversation", "another conversation (decoy)",
  "another response to its query (decoy)"];
const ROW = 52; // pixels; .row has 3.25rem of 16 pixels

unpacked().then((data) => {
  const { contexts, turns } = data;
  const count = turns.context.length;
  const temperature = (t) => (t === 0 ? "greedy" : `T = ${t}`);
  const of = (column) => (i) => contexts[column][turns.context[i]];
  const bits = turns.bits;
  const judges = Object.keys(turns.labels);
  const own = turns.decoy.filter((kind) => kind === 0).length;

  // -- filters: each has a control and a test of a turn, or null where all pass ----------------
  const form = at("filters");
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

  function number(name, test) {
    const input = el("input", { type: "number", step: "0.1", size: "6" });
    form.append(el("label", {}, name, input));
    return input;
  }

  const named = (column, names) => (i) => names[of(column)(i)];
  choice("run", data.runs, named("run", data.runs));
  choice("dataset", data.datasets, named("dataset", data.datasets));
  choice("temperature", [...new Set(turns.temperature)].sort((a, b) => a - b),
    (i) => turns.temperature[i], temperature);
  for (const judge of judges) {
    const codes = turns.labels[judge].category;
    choice(judges.length > 1 ? `category by ${judge}` : "category",
      data.categories.filter((_, k) => codes.includes(k)), (i) => data.categories[codes[i]]);
  }
  for (const judge of judges) {
    for (const outcome of ["grounded", "dependent"]) {
      const values = turns.labels[judge][outcome] || [];
      choice(`genuine and ${outcome}${judges.length > 1 ? ` by ${judge}` : ""}`,
        [1, 0].filter((value) => values.includes(value)), (i) => values[i],
        (value) => (value ? "yes" : "no"));
    }
  }
  choice("shown after", AFTER.filter((_, k) => turns.decoy.includes(k)),
    (i) => AFTER[turns.decoy[i]], String, AFTER[0]);
  choice("response", [...new Set(contexts.response_index)].filter((k) => k !== null)
    .sort((a, b) => a - b), of("response_index"));
  if (bits) {
    for (const [name, beyond] of [["bits from", (b, v) => b >= v], ["bits to", (b, v) => b <= v]]) {
      const input = number(name);
      filters.push(() => {
        if (input.value === "") return null;
        const limit = Number(input.value);
        return (i) => bits[i] !== null && beyond(bits[i], limit);
      });
    }
  }
  const search = el("input", { type: "search" });
  form.append(el("label", {}, "text (turn, query, response)", search));
  let lower = null; // made when first searched
  filters.push(() => {
    const wanted = search.value.trim().toLowerCase();
    if (wanted === "") return null;
    if (lower === null) {
      lower = {
        turns: turns.text.map((text) => text.toLowerCase()),
        contexts: contexts.query.map((text, c) => `${text}\n${contexts.response[c]}`.toLowerCase()),
      };
    }
    const inContext = lower.contexts.map((text) => text.includes(wanted));
    return (i) => inContext[turns.context[i]] || lower.turns[i].includes(wanted);
  });
  form.append(el("button", { type: "reset" }, "clear"));

  // -- the list: only the rows in view are elements --------------------------------------------
  const list = at("list");
  const rows = at("rows");
  let found = [];
  let chosen = -1; // a turn

  function said(i) {
    return judges.map((judge) => {
      const category = data.categories[turns.labels[judge].category[i]];
      return judges.length > 1 ? `${judge}: ${category}` : category;
    });
  }

  function about(i) {
    const parts = [temperature(turns.temperature[i]), ...said(i)];
    if (turns.decoy[i]) parts.push(`shown after ${AFTER[turns.decoy[i]]}`);
    if (bits && bits[i] !== null) parts.push(`${bits[i].toFixed(2)} bits`);
    return parts;
  }

  function draw() {
    const first = Math.max(0, Math.floor(list.scrollTop / ROW) - 4);
    const last = Math.min(found.length, first + Math.ceil(list.clientHeight / ROW) + 8);
    const made = [];
    for (let k = first; k < last; k++) {
      const i = found[k];
      const run = data.runs.length > 1 ? [data.runs[contexts.run[turns.context[i]]]] : [];
      const row = el("div", {
        class: "row", role: "option", id: `turn-${i}`, "aria-selected": String(i === chosen),
        "aria-posinset": String(k + 1), "aria-setsize": String(found.length),
        onclick: () => choose(i),
      }, el("div", {}, turns.text[i].slice(0, 300) || "(empty)"),
      el("div", { class: "meta" },
        [...run, contexts.id[turns.context[i]], ...about(i)].join(" · ")));
      row.style.top = `${k * ROW}px`;
      made.push(row);
    }
    rows.replaceChildren(...made);
  }

  function filter() {
    const tests = filters.map((make) => make()).filter((test) => test !== null);
    found = [];
    for (let i = 0; i < count; i++) if (tests.every((test) => test(i))) found.push(i);
    at("count").textContent = `${found.length} of ${own} turns${own < count ? ` and ${count - own} decoys` : ""}`;
    rows.style.height = `${found.length * ROW}px`;
    list.scrollTop = 0;
    if (found.length && !found.includes(chosen)) {
      chosen = found[0];
      show(turns.context[chosen]);
    }
    draw();
  }

  let waiting = 0;
  list.addEventListener("scroll", () => {
    if (!waiting) waiting = requestAnimationFrame(() => { waiting = 0; draw(); });
  });
  // The address names what is shown.
  function refilter() {
    filter();
    if (found.length) choose(chosen);
    else at("context").replaceChildren(el("p", {}, "No turn passes these filters."));
  }
  form.addEventListener("input", refilter);
  form.addEventListener("reset", () => setTimeout(refilter));
  form.addEventListener("submit", (event) => event.preventDefault());

  list.addEventListener("keydown", (event) => {
    const page = Math.max(1, Math.floor(list.clientHeight / ROW) - 1);
    const steps = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page,
      Home: -count, End: count };
    if (!(event.key in steps) || found.length === 0) return;
    event.preventDefault();
    const here = found.indexOf(chosen);
    const next = Math.min(found.length - 1, Math.max(0, here + steps[event.key]));
    list.scrollTop = Math.min(next * ROW, Math.max(list.scrollTop, (next + 1) * ROW - list.clientHeight));
    choose(found[next]);
  });

  // -- one context ------------------------------------------------------------------------------
  function text(content, words) {
    return el("div",
      { class: "text", dir: "auto", tabindex: "0", role: "group", "aria-label": words }, content);
  }

  // A turn with its tokens shaded. `most` is the value of the darkest.
  function shaded(i, values, colour, most, words) {
    const pieces = turns.pieces && turns.pieces[i];
    const whole = turns.text[i];
    if (!pieces || !values) return text(whole || "(empty)", words);
    const shown = text("", words);
    let from = 0;
    pieces.forEach((length, k) => {
      const value = values[k] === undefined || values[k] === null ? 0 : values[k];
      const token = el("span", { title: value.toFixed(2) }, whole.slice(from, from + length));
      const share = Math.min(1, Math.abs(value) / most) * 0.55;
      token.style.backgroundColor = `rgba(var(${value < 0 && colour === "--bits" ? "--odd" : colour}), ${share})`;
      shown.append(token);
      from += length;
    });
    shown.append(whole.slice(from));
    return shown;
  }

  const shadings = { nothing: null };
  if (turns.token_bits) shadings["bits per token"] = (i) => [turns.token_bits[i], "--bits", 3];
  if (turns.logprobs) {
    shadings["how unlikely each token was"] = (i) =>
      [turns.logprobs[i] && turns.logprobs[i].map((p) => -p), "--odd", 8];
  }
  let shading = Object.keys(shadings).at(-1);
  if (turns.token_bits) shading = "bits per token";

  function card(i) {
    const make = shadings[shading];
    const children = [el("div", { class: "meta" }, about(i).join(" · ")),
      shaded(i, ...(make ? make(i) : [null, "--bits", 1]), "user turn")];
    for (const judge of judges) {
      const reason = turns.labels[judge].reason[i];
      if (reason) children.push(el("div", { class: "meta" }, `because: ${reason}`));
    }
    if (turns.logprob && turns.logprob[i] !== null) {
      children.push(el("div", { class: "meta" }, `log p ${turns.logprob[i].toFixed(1)} at T = 1`));
    }
    return el("div", { class: i === chosen ? "card chosen" : "card" }, ...children);
  }

  function show(c) {
    const mine = [];
    const decoys = [];
    for (let i = 0; i < count; i++) {
      if (turns.context[i] === c) (turns.decoy[i] ? decoys : mine).push(i);
    }
    const heading = data.runs.length > 1
      ? `${data.runs[contexts.run[c]]} · ${contexts.id[c]}` : contexts.id[c];
    const notes = [data.datasets[contexts.dataset[c]]];
    if (contexts.response_index[c] !== null) notes.push(`response ${contexts.response_index[c]}`);
    if (contexts.cut_off[c]) notes.push("the response was cut off");
    for (const [name, values] of Object.entries(contexts.probes)) {
      if (values[c] !== null) notes.push(`probe ${name} predicts a rate of ${values[c].toFixed(2)}`);
    }
    const select = el("select", { onchange: () => { shading = select.value; show(c); } },
      ...Object.keys(shadings).map((name) => el("option", { value: name, selected: name === shading }, name)));
    const written = [el("h4", {}, "User turns")];
    if (Object.keys(shadings).length > 1) written.push(el("label", {}, "shade", select));
    const beside = decoys.length === 0 ? [] : [
      el("h4", {}, "Decoys: turns that did not follow this, as judges were shown them"),
      el("div", { class: "cards" }, ...decoys.map(card))];
    at("context").replaceChildren(
      el("h3", {}, heading), el("p", { class: "meta" }, notes.join(" · ")),
      el("div", { class: "sides" },
        el("div", {}, el("h4", {}, "Query"), text(contexts.query[c], "query"),
          el("h4", {}, "Response"), text(contexts.response[c], "response")),
        el("div", {}, ...written, el("div", { class: "cards" }, ...mine.map(card)), ...beside)));
  }

  function choose(i) {
    chosen = i;
    const c = turns.context[i];
    const place = new URLSearchParams({ context: contexts.id[c], run: contexts.run[c], turn: i });
    if (data.runs.length === 1) place.delete("run");
    history.replaceState(null, "", `#${place}`);
    list.setAttribute("aria-activedescendant", `turn-${i}`);
    show(c);
    draw();
  }

  function follow() {
    const place = new URLSearchParams(location.hash.slice(1));
    if (!place.has("context")) return;
    const run = Number(place.get("run") || 0);
    const c = contexts.id.findIndex((id, k) => id === place.get("context") && contexts.run[k] === run);
    if (c < 0) {
      at("context").replaceChildren(el("p", {}, "This page has no such context."));
      return;
    }
    const turn = Number(place.get("turn") || -1);
    chosen = turns.context[turn] === c ? turn : turns.context.indexOf(c);
    show(c);
    draw();
    at("context").scrollIntoView();
    at("context").focus({ preventScroll: true });
  }

  window.addEventListener("hashchange", follow);
  window.addEventListener("beforeprint", () => {
    for (const part of document.querySelectorAll("details")) part.open = true;
  });
  filter();
  follow();
});
