
unpacked().then((data) => {
  const { sheet, rows, categories } = data;
  // Work is kept by the digest of the sheet's content: two sheets may have the same name.
  const key = `annotations ${data.digest}`;
  const empty = () => ({ labels: {}, notes: {}, later: [], steps: [] });
  let state = empty();
  reread();

  // Read what this tab or another has kept. Every change begins with it, so no tab undoes another's work.
  function reread() {
    try {
      state = JSON.parse(localStorage.getItem(key)) || state;
    } catch {
      warn();
    }
  }

  function warn() {
    byId("problem").textContent =
      "This browser keeps nothing for this page: export your work before you close it.";
  }

  function keep() {
    try {
      localStorage.setItem(key, JSON.stringify(state));
    } catch {
      warn();
    }
  }

  // The first turn without a label; deferred ones come last, in the order they were deferred.
  function current() {
    const later = new Set(state.later);
    const open = (row) => !(row.item in state.labels);
    return rows.find((row) => open(row) && !later.has(row.item))
      || rows.find((row) => row.item === state.later.find((item) => !(item in state.labels)));
  }

  let shown = null;

  function text(title, content) {
    return [el("h2", {}, title),
      el("div", { class: "text", dir: "auto", tabindex: "0", role: "group", "aria-label": title },
        content || "(empty)")];
  }

  function show() {
    const done = Object.keys(state.labels).length;
    byId("done").max = rows.length;
    byId("done").value = done;
    const waiting = state.later.filter((item) => !(item in state.labels)).length;
    byId("state").textContent = `${done} of ${rows.length} done` + (waiting ? `, ${waiting} deferred` : "");
    byId("undo").disabled = state.steps.length === 0;
    shown = current();
    byId("defer").disabled = byId("note").disabled = !shown;
    for (const button of byId("choices").children) button.disabled = !shown;
    if (document.activeElement !== byId("note")) {
      byId("note").value = shown ? state.notes[shown.item] || "" : "";
    }
    byId("turn").replaceChildren(...(shown ? [
      ...text("Query", shown.query),
      ...text(shown.response_complete ? "Response" : "Response (it is unfinished)", shown.response),
      ...text("User turn", shown.user_turn),
    ] : [el("p", {}, "All turns are annotated. Export them, and hand the file over.")]));
  }

  function step(change) {
    if (!shown) return;
    reread();
    state.steps.push({ item: shown.item, later: [...state.later] });
    change(shown.item);
    keep();
    show();
  }

  function label(name) {
    step((item) => { state.labels[item] = name; });
  }

  function defer() {
    step((item) => { state.later = [...state.later.filter((other) => other !== item), item]; });
  }

  function undo() {
    reread();
    const last = state.steps.pop();
    if (!last) return;
    delete state.labels[last.item];
    state.later = last.later;
    keep();
    show();
  }

  function save() {
    reread();
    const cell = (text) => `"${text.replaceAll('"', '""')}"`;
    const made = rows.filter((row) => row.item in state.labels || state.notes[row.item])
      .map(({ item }) => [item, state.labels[item] || "", state.notes[item] || ""]);
    const lines = [["item", "category", "note"], ...made].map((row) => row.map(cell).join(","));
    saveAs(`${sheet}-filled.csv`, `\ufeff${lines.join("\r\n")}\r\n`, "text/csv");
  }

  function restart() {
    if (!confirm("Forget all annotations of this page in this browser?")) return;
    state = empty();
    keep();
    show();
  }

  const keys = { u: undo, d: defer, e: save, n: () => byId("note").focus() };
  categories.forEach(({ name, shown: called, key: pressed, short }) => {
    keys[pressed] = () => label(name);
    byId("choices").append(el("button", { type: "button", onclick: keys[pressed] },
      el("kbd", {}, pressed), ` ${called}`, el("span", { class: "small" }, ` ${short}`)));
  });
  for (const [id, action] of Object.entries({ undo, defer, export: save, restart })) {
    byId(id).addEventListener("click", action);
  }
  byId("note").addEventListener("input", () => {
    if (!shown) return;
    reread();
    state.notes[shown.item] = byId("note").value;
    keep();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") byId("note").blur();
    if (event.target === byId("note") || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.repeat || !(event.key in keys)) return;
    event.preventDefault();
    keys[event.key]();
  });
  window.addEventListener("storage", (event) => {
    if (event.key !== key || document.activeElement === byId("note")) return;
    reread();
    show();
  });
  show();
});
