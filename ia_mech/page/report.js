
// The conversation before which a judge was shown a turn; and the caption of a decoy in that conversation.
const SHOWN_AFTER = ["its own conversation", "a wrong conversation", "a sibling of its response"];
const DECOYS = [null, "wrong_conversation", "sibling"]; // as results name them
const DECOY = [null, "this is a wrong conversation for it", "this response is a sibling of its own"];
const RESTATES = "mostly the query's words"; // said of turns that judge/restated.py suspects
const WHOLE = "whole turns"; // all of whose tokens are sampled, and greedy ones
const UNCHANGED = "unchanged"; // the condition of a conversation that no experiment changed
const CONTEXTS = 10; // on a page
const DRAWN = 20; // turns in a random draw

// A number that looks random and is always the same for the same arguments.
function noise(i, seed) {
  let x = Math.imul(i + 1, 0x9e3779b1) ^ Math.imul(seed + 1, 0x85ebca6b);
  x = Math.imul(x ^ (x >>> 15), 0x2c1b3c6d);
  x = Math.imul(x ^ (x >>> 12), 0x297a2d39);
  return (x ^ (x >>> 15)) >>> 0;
}

for (const button of document.querySelectorAll("figure button")) {
  button.addEventListener("click", () => {
    const close = el("button", { type: "button" }, "close");
    const parts = [...button.parentElement.querySelectorAll("img, svg")].map((part) => part.cloneNode(true));
    byId("enlarged").replaceChildren(close, el("div", { class: "plot" }, ...parts));
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

  // -- filters: each has a control, and gives a test of a turn, or null where all pass. ----------
  // The page's address holds what is chosen, under the names of the controls.
  const form = byId("filters");
  const more = el("details", {}, el("summary", {}, "more filters"));
  const filters = [];

  function control(name, element, place = more) {
    element.name = name;
    place.append(el("label", {}, name, element));
    return element;
  }

  // `tests` is a list of [label, test of a turn]; of two with the same label the first counts.
  function choice(name, tests, first = "", place = more) {
    tests = tests.filter(([shown], k) => tests.findIndex(([other]) => other === shown) === k);
    if (tests.length < 2) return;
    const select = control(name, el("select", {}, el("option", { value: "" }, "all"), ...tests.map(
      ([shown]) => el("option", { value: shown, defaultSelected: shown === first }, shown))), place);
    const byName = new Map(tests);
    filters.push(() => byName.get(select.value) || null);
  }

  const valuesOf = (values, of, shown = String) =>
    [...new Set(values)].map((value) => [shown(value), (i) => of(i) === value]);

  const followUp = data.categories.map((name) => data.follow_ups.includes(name));
  const assessed = data.categories.map((name, k) => k < data.categories.length - 2); // the last two: no verdict
  const byJudge = (judge) => (judges.length > 1 ? ` by ${judge}` : "");
  const ofContext = (column) => (i) => contexts[column][turns.context[i]];
  const search = control("text of turn or conversation", el("input", { type: "search" }), form);
  for (const judge of judges) {
    const codes = turns.labels[judge].category;
    choice(`category${byJudge(judge)}`, [
      ["follow-up", (i) => followUp[codes[i]]],
      ...(turns.restates.some((yes, i) => yes && followUp[codes[i]])
        ? [[`follow-up, ${RESTATES}`, (i) => followUp[codes[i]] && turns.restates[i]]] : []),
      ["no follow-up", (i) => assessed[codes[i]] && !followUp[codes[i]]],
      ...valuesOf(upwards(codes), (i) => codes[i], (k) => data.headings[k]),
    ], "", form);
  }
  if (judges.length > 1) {
    const verdicts = (i) => judges.map((judge) => turns.labels[judge].category[i]).filter((k) => assessed[k]);
    const disagree = (i) => new Set(verdicts(i).map((k) => followUp[k])).size > 1;
    choice("judges and annotators", [
      ["disagree", disagree], ["agree", (i) => verdicts(i).length > 1 && !disagree(i)]]);
  }
  choice("temperature", valuesOf(upwards(turns.temperature), (i) => turns.temperature[i], temperature), "", form);
  const whole = turns.drawn.some((k, i) => k === 0 && turns.temperature[i] > 0); // most tables count these alone
  choice("sampled tokens", valuesOf(upwards(turns.drawn), (i) => turns.drawn[i], (k) => (k ? String(k) : WHOLE)), whole ? WHOLE : "");
  choice("condition", valuesOf(contexts.condition, ofContext("condition")), UNCHANGED);
  const fits = turns.follow_up_to_original; // of turns after changed conversations
  if (fits) {
    choice("follow-up to the unchanged response", [["yes", (i) => fits[i] === 1], ["no", (i) => fits[i] === 0]]);
  }
  choice("run", valuesOf(contexts.run, ofContext("run"), (k) => data.runs[k]));
  choice("dataset", valuesOf(upwards(contexts.dataset), ofContext("dataset"), (k) => data.datasets[k]));
  choice("response", valuesOf(upwards(contexts.response_index.filter((k) => k !== null)), ofContext("response_index")));
  for (const [field, values] of Object.entries(contexts.fields)) {
    choice(`data: ${field}`, valuesOf([...new Set(values)].sort(), (i) => values[turns.context[i]]));
  }
  for (const judge of judges) {
    const values = turns.labels[judge].dependent || [];
    choice(`follow-up and dependent${byJudge(judge)}`, valuesOf([1, 0].filter((value) => values.includes(value)),
      (i) => values[i], (value) => (value ? "yes" : "no")));
  }
  choice("shown after", valuesOf(upwards(turns.decoy), (i) => turns.decoy[i], (k) => SHOWN_AFTER[k]), SHOWN_AFTER[0]);
  for (const [name, beyond] of [["bits from", (b, v) => b >= v], ["bits to", (b, v) => b <= v]]) {
    if (!bits) break;
    const input = control(name, el("input", { type: "number", step: "0.1" }));
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

  // Turns can be drawn at random. Contexts can be sorted by the largest value of their turns that pass.
  const draws = control(`${DRAWN} at random: seed`, el("input", { type: "number", min: "1", step: "1" }));
  const orders = { "as sampled": null, random: (i) => noise(turns.context[i], 0), "the likeliest turn": (i) => turns.logprob[i] };
  if (bits) orders["most bits"] = (i) => bits[i];
  for (const judge of judges) {
    const scores = turns.labels[judge].score;
    if (scores.some((score) => score !== null)) orders[`highest p(follow-up) by ${judge}`] = (i) => scores[i];
  }
  for (const name of Object.keys(contexts.probes)) {
    orders[`highest prediction of ${name}`] = (i) => contexts.probes[name][turns.context[i]];
  }
  const sorting = control("sort conversations by", el("select", {}, ...Object.keys(orders).map((name) =>
    el("option", { value: name, defaultSelected: name === "as sampled" }, name))));

  // Tokens are shaded by a value: each entry gives values, colour, and the value of the darkest shade.
  const shadings = { nothing: null };
  if (turns.token_bits) shadings["bits about the response"] = (i) => [turns.token_bits[i], "--bits", 3];
  if (turns.logprobs && turns.pieces.some((pieces) => pieces)) {
    shadings["how unlikely they were"] = (i) =>
      [turns.logprobs[i] && turns.logprobs[i].map((p) => -p), "--odd", 8];
  }
  const shading = el("select", {}, ...Object.keys(shadings).map((name) =>
    el("option", { value: name, defaultSelected: name.startsWith("bits") }, name)));
  if (shading.length > 1) control("shade tokens by", shading);
  more.append(el("button", { type: "button", onclick: exported }, "save these turns (JSON lines)"));
  form.append(el("button", { type: "button", onclick: () => { form.reset(); chosen(); } }, "clear"), more);

  // -- one context with its turns ---------------------------------------------------------------
  function text(content, name) {
    return el("div", { class: "text", dir: "auto", role: "group", "aria-label": name }, content || "(empty)");
  }

  const chance = (share) => (share < 0.001 ? "p < 0.001" : `p = ${share.toFixed(3)}`);
  const openings = (c) => (contexts.first[c] || []).map(([token, share]) => `${JSON.stringify(token)} ${chance(share)}`);

  // A turn; each token has a shade, and a title with its numbers. The first token's title lists the likeliest tokens.
  function tokens(i) {
    const pieces = turns.pieces[i];
    if (!pieces) return text(turns.text[i], "user turn");
    const [values, colour, most] = shadings[shading.value] ? shadings[shading.value](i) : [];
    const told = turns.token_bits && turns.token_bits[i], logprobs = turns.logprobs[i];
    const shown = text(" ", "user turn");
    let from = 0;
    shown.replaceChildren(...pieces.map((length, k) => {
      const known = [];
      if (told && told[k] !== null) known.push(`${told[k].toFixed(2)} bits`);
      if (logprobs) known.push(`${chance(Math.exp(logprobs[k]))} at T = 1`);
      if (k === 0 && contexts.first[turns.context[i]]) known.push("likeliest here:", ...openings(turns.context[i]));
      const token = el("span", { title: known.join("\n") }, turns.text[i].slice(from, from + length));
      const value = (values && values[k]) || 0;
      if (value) {
        const share = Math.min(1, Math.abs(value) / most) * 0.55;
        token.style.backgroundColor = `rgba(var(${value < 0 && colour === "--bits" ? "--odd" : colour}), ${share})`;
      }
      from += length;
      return token;
    }), turns.text[i].slice(from));
    return shown;
  }

  function turn(i) {
    const why = [];
    const labels = judges.map((judge) => {
      const { category, reason, score } = turns.labels[judge];
      const yes = followUp[category[i]];
      const chance = score[i] === null ? "" : `p(follow-up) ${score[i].toFixed(2)}`;
      const said = [chance, reason[i]].filter((part) => part).join(" · ");
      if (said) why.push(judges.length > 1 ? `${judge}: ${said}` : said);
      return el("span", { class: yes ? "follow-up" : "" }, (yes ? "✓ " : "") + data.headings[category[i]]
        + (yes && turns.restates[i] ? `, ${RESTATES}` : "") + byJudge(judge));
    });
    if (fits && fits[i] !== null) labels.push(`${fits[i] ? "✓ a" : "no"} follow-up to the unchanged response`);
    if (turns.decoy[i]) labels.push(DECOY[turns.decoy[i]]);
    if (bits && bits[i] !== null) labels.push(`${bits[i].toFixed(2)} bits`);
    if (turns.logprob[i] !== null) why.push(`log p ${turns.logprob[i].toFixed(1)} at T = 1`);
    const line = labels.flatMap((part, k) => (k ? [" · ", part] : [part]));
    if (why.length) line.push(el("span", { class: "why" }, judges.length ? "why" : "more"));
    return el("div", { class: turns.decoy[i] ? "turn decoy" : "turn" }, tokens(i), why.length
      ? el("details", { class: "meta" }, el("summary", {}, ...line), ...why.map((part) => el("p", {}, part)))
      : el("div", { class: "meta" }, ...line));
  }

  function columns(indices) {
    const drawn = (i) => (turns.drawn[i] ? `, first ${turns.drawn[i]} sampled` : "");
    const heading = (i) => temperature(turns.temperature[i]) + drawn(i);
    return el("div", { class: "columns" }, ...[...new Set(indices.map(heading))].map((name) =>
      el("div", {}, el("h4", {}, name), ...indices.filter((i) => heading(i) === name).map(turn))));
  }

  // Turns in a fold; their elements are made when it is first opened.
  function folded(title, indices) {
    if (indices.length === 0) return [];
    const fold = el("details", {}, el("summary", {}, `${indices.length} ${title}`));
    fold.addEventListener("toggle", () => { fold.append(columns(indices)); makeReachable(fold); }, { once: true });
    return [fold];
  }

  // A fold with more about a context; nothing where the content is missing.
  const said = (title, content) => (content
    ? [el("details", {}, el("summary", {}, title), text(content, title))] : []);

  function row(c) {
    const shown = [], others = [], decoys = [];
    for (const i of turnsOf[c]) (passes[i] ? shown : turns.decoy[i] ? decoys : others).push(i);
    const place = new URLSearchParams({ context: contexts.id[c], ...(several && { run: contexts.run[c] }) });
    const about = [data.datasets[contexts.dataset[c]]];
    if (contexts.response_index[c] !== null) about.push(`response ${contexts.response_index[c]}`);
    if (contexts.condition[c] !== UNCHANGED) about.push(`changed: ${contexts.condition[c]}`);
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
        el("h4", {}, "response"), text(contexts.response[c], "response"),
        ...said("the real follow-up", contexts.real_follow_up[c]),
        ...said("gold answer", contexts.answer[c]),
        ...said("likeliest first tokens of a turn, at T = 1", openings(c).join("\n")),
        ...said("system prompt and rendered header", contexts.before[c] && `${contexts.before[c]}…${contexts.after[c]}`)),
      el("div", {}, columns(shown), ...folded("other turns", others),
        ...folded(`turns of other conversations${decoys.some((i) => turns.decoy[i] === 2) ? " or after siblings" : ""}`
          + ", shown to judges here as a control", decoys)));
  }

  // Make texts that scroll reachable by keyboard.
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
      + `${number(found.length)} conversations, ${number(turnsFound)} turns`;
  }

  function filter() {
    const tests = filters.map((make) => make()).filter((test) => test !== null);
    for (let i = 0; i < count; i++) passes[i] = tests.every((test) => test(i)) ? 1 : 0;
    const seed = Number(draws.value);
    let value = orders[sorting.value];
    if (seed > 0) {
      value = (i) => noise(i, seed);
      const kept = [...passes.keys()].filter((i) => passes[i]).sort((a, b) => value(b) - value(a));
      passes.fill(0);
      for (const i of kept.slice(0, DRAWN)) passes[i] = 1;
    }
    const hit = new Uint8Array(contexts.id.length), largest = new Float64Array(contexts.id.length).fill(-Infinity);
    for (let i = 0; i < count; i++) {
      if (!passes[i]) continue;
      const c = turns.context[i];
      hit[c] = 1;
      if (value) largest[c] = Math.max(largest[c], value(i) ?? -Infinity);
    }
    found = [...hit.keys()].filter((c) => hit[c]);
    if (value) found.sort((a, b) => largest[b] - largest[a] || a - b); // -∞ minus -∞ is NaN
    first = 0;
    draw();
  }

  function turned(by) {
    first += by;
    draw();
    rows.scrollIntoView();
  }

  // -- the page's address: what was chosen, or one context ----------------------------------------
  const controls = () => [...form.elements].filter((one) => one.name);
  const usual = (one) => (one.tagName === "SELECT" ? [...one.options].find((o) => o.defaultSelected) : { value: "" });

  function chosen() {
    filter();
    const changed = controls().filter((one) => one.value !== (usual(one) || one.options[0]).value);
    history.replaceState(null, "", `#${new URLSearchParams(changed.map((one) => [one.name, one.value]))}`);
  }

  function exported() {
    const lines = [...passes.keys()].filter((i) => passes[i]).map((i) => {
      const c = turns.context[i];
      const labels = Object.fromEntries(judges.map((judge) => {
        const { category, reason, score } = turns.labels[judge];
        return [judge, { category: data.categories[category[i]], score: score[i], reason: reason[i] }];
      }));
      return JSON.stringify({
        run: data.runs[contexts.run[c]], dataset: data.datasets[contexts.dataset[c]],
        context_id: contexts.id[c], condition: contexts.condition[c], temperature: turns.temperature[i],
        sampled_tokens: turns.drawn[i] || "all", shown_after: SHOWN_AFTER[turns.decoy[i]],
        query: contexts.query[c], response: contexts.response[c], user_turn: turns.text[i], labels,
        log_p: turns.logprob[i], bits: bits && bits[i],
      });
    });
    saveAs("turns.jsonl", lines.map((line) => `${line}\n`).join(""), "application/jsonl");
  }

  function follow() {
    const place = new URLSearchParams(location.hash.slice(1));
    const named = controls().filter((one) => place.has(one.name));
    if (place.has("context")) return followContext(place);
    if (!named.length && location.hash) return; // a section of the page
    form.reset();
    for (const one of named) one.value = place.get(one.name);
    const lost = named.filter((one) => one.value !== place.get(one.name));
    for (const one of lost) one.value = ""; // all
    if (named.some((one) => more.contains(one))) more.open = true;
    filter();
    if (!named.length) return;
    for (const one of lost) byId("count").append(` This page has no ${one.name} ${place.get(one.name)}.`);
    byId("turns").scrollIntoView();
    byId("turns").focus({ preventScroll: true });
  }

  function followContext(place) {
    const run = Number(place.get("run") || 0);
    const c = contexts.id.findIndex((id, k) => id === place.get("context") && contexts.run[k] === run);
    if (c >= 0 && !found.includes(c)) {
      form.reset();
      const condition = form.elements.namedItem("condition");
      if (condition) condition.value = contexts.condition[c];
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

  form.addEventListener("input", (event) => (event.target === shading ? draw() : chosen()));
  form.addEventListener("submit", (event) => event.preventDefault());
  byId("previous").addEventListener("click", () => turned(-CONTEXTS));
  byId("next").addEventListener("click", () => turned(CONTEXTS));
  window.addEventListener("hashchange", follow);
  filter();
  follow();

  // -- a number leads to its turns: filters are set from the cells of its row and the table's title,
  // or from the link of a point in a figure -----
  const values = (name) => [...(form.elements.namedItem(name)?.options || [])].map((o) => o.value);
  const link = (place, ...content) => el("a", { href: `#${new URLSearchParams(place)}` }, ...content);

  function placeOf(pairs, { judge: ofSide, by, drawn }) {
    const judge = ofSide || judges[0];
    const place = {}, row = new Map(pairs), category = `category${byJudge(judge)}`;
    const heading = (cell) => data.headings[data.categories.indexOf(cell)] || cell;
    if (row.get("quantity") === "beyond") return {}; // compares turns with decoys
    if (pairs.some(([head]) => head.startsWith("rise"))) return {}; // compares two temperatures
    const named = row.get("category") === "–" ? "" : row.get("category"); // no category
    if (named && !values(category).includes(heading(named))) return {}; // the page has no such turns
    for (const [head, cell] of pairs) {
      const at = ["T", "temperature"].includes(head) && cell ? Number(cell === "greedy" ? 0 : cell.replace("*", "")) : NaN; // * above the judge's fit
      const sampled = values("temperature");
      if (!isNaN(at) && sampled.length && !sampled.includes(temperature(at))) return {}; // the page has no such turns
      if (head === "condition" && !values(head).includes(cell)) return {};
      const field = `data: ${head === "dataset" && by ? by : head}`; // a field by whose values rates are grouped
      const wanted = {
        temperature: temperature(at), condition: ["condition", "what"].includes(head) && cell, [field]: cell, dataset: values(field).length ? "" : cell, run: cell,
        [category]: heading(named || cell),
        "shown after": head === "decoy" && row.get("quantity") !== "rate_after_own" && SHOWN_AFTER[DECOYS.indexOf(cell)],
      };
      for (const [name, value] of Object.entries(wanted)) {
        if (value && value !== "all" && values(name).includes(value)) place[name] = value;
      }
    }
    if (drawn && place.temperature && place.temperature !== temperature(0)) place["sampled tokens"] = drawn;
    return place;
  }

  const firstCard = document.querySelector(".card");
  for (const side of document.querySelectorAll(".side")) {
    if ("elsewhere" in side.dataset) {
      side.querySelectorAll(".plot a").forEach((mark) => mark.remove());
      continue;
    }
    const own = values("run").includes(side.dataset.run) ? { run: side.dataset.run } : {};
    const changed = [...side.querySelectorAll("td")].some((cell) => values("condition").includes(cell.textContent.trim()));
    if (changed && values("condition").length) own.condition = ""; // all of them, where a link names none
    const name = `category${byJudge(side.dataset.judge)}`;
    if (side.dataset.judge && values(name).length && side.closest(".card") === firstCard) {
      side.querySelector(".control").after(el("p", { class: "screen" }, "Read ",
        link({ ...own, [name]: "follow-up" }, "the turns that the judge calls follow-ups"), ", or ",
        link({ ...own, [name]: "no follow-up" }, "the other turns"), "."));
    }
    for (const mark of side.querySelectorAll(".plot a")) {
      const place = placeOf([...new URLSearchParams(mark.getAttribute("href").slice(1))], side.dataset);
      if (Object.keys(place).length === 0) {
        mark.remove();
        continue;
      }
      mark.setAttribute("href", `#${new URLSearchParams({ ...own, ...place })}`);
      mark.firstElementChild.prepend("read turns: ");
    }
    for (const table of side.querySelectorAll("table")) {
      const heads = [...table.tHead.rows[0].cells].map((cell) => cell.textContent);
      const titles = (table.caption?.textContent || "").split(" · ").map((part) => part.split(": "));
      for (const { cells } of table.tBodies[0].rows) {
        const pairs = [...cells].map((cell, k) => [heads[k], cell.textContent]);
        const place = placeOf([...titles.filter((pair) => pair.length === 2), ...pairs], side.dataset);
        if (cells.length && Object.keys(place).length) {
          cells[0].replaceChildren(link({ ...own, ...place }, cells[0].textContent || "turns"));
        }
      }
    }
  }
});

// -- in each card a word links, where it first stands, to its meaning, and shows it as a title -------
const entries = new Map([...document.querySelectorAll("#words dt")].map((word) => [word.textContent.toLowerCase(), word]));
const listed = [...entries.keys()].filter((word) => word.length > 1).sort((a, b) => b.length - a.length);
const inText = new RegExp(`\\b(${listed.join("|")})s?\\b`, "gi");
const used = new Set();
for (const card of document.querySelectorAll(".card")) {
  const left = new Map(entries);
  const walker = document.createTreeWalker(card, NodeFilter.SHOW_TEXT, (node) =>
    (node.parentElement.closest("p, li, caption, thead, figcaption") && !node.parentElement.closest("a, code")
      ? NodeFilter.FILTER_ACCEPT : NodeFilter.FILTER_SKIP));
  const texts = [];
  while (walker.nextNode()) texts.push(walker.currentNode);
  for (const node of texts) {
    const parts = [];
    let from = 0;
    for (const { 0: shown, 1: word, index } of node.data.matchAll(inText)) {
      const entry = left.get(word.toLowerCase());
      if (!entry) continue;
      left.delete(word.toLowerCase());
      used.add(entry);
      parts.push(node.data.slice(from, index), el("a", { class: "term", href: `#${entry.id}`,
        title: entry.nextElementSibling.textContent, onclick: () => { entry.closest("details").open = true; } }, shown));
      from = index + shown.length;
    }
    if (parts.length) node.replaceWith(...parts, node.data.slice(from));
  }
}
for (const entry of entries.values()) {
  if (used.has(entry)) continue;
  entry.nextElementSibling.remove();
  entry.remove();
}
