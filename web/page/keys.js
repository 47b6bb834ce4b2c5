// Every action of the page with its keys: the buttons, the key presses and the table of keys are made of this list.

const NAMES = { " ": "Space", ArrowLeft: "Left", ArrowRight: "Right", ArrowUp: "Up", ArrowDown: "Down", Escape: "Esc" };

/** A key press as it is written in the list: Shift+R, Ctrl+Z, ?, Space. */
export function nameOf(event) {
  let key = NAMES[event.key] ?? event.key;
  const digit = /^(?:Digit|Numpad)([0-9])$/.exec(event.code);
  if (digit && (event.shiftKey || /^[0-9]$/.test(key))) key = digit[1];
  const letter = key.length === 1 && key.toUpperCase() !== key.toLowerCase();
  if (letter) key = key.toUpperCase();
  const shift = event.shiftKey && (letter || digit || key.length > 1);
  return `${event.ctrlKey || event.metaKey ? "Ctrl+" : ""}${event.altKey ? "Alt+" : ""}${shift ? "Shift+" : ""}${key}`;
}

/** Whether a control has its own use of a key. */
function taken(target, name) {
  if (target.closest("dialog[open]")) return true;
  if (target instanceof HTMLSelectElement) return name !== "Esc";
  if (target instanceof HTMLInputElement) {
    if (target.type === "range") return ["Left", "Right", "Up", "Down", "Home", "End", "PageUp", "PageDown"].includes(name);
    if (target.type === "checkbox" || target.type === "color") return name === "Space" || name === "Enter";
    return name !== "Esc";
  }
  return (target instanceof HTMLButtonElement || target.tagName === "SUMMARY") && (name === "Space" || name === "Enter");
}

/**
 * @param actions [{ id, group, keys, label, run(name), release() }]
 */
export function bind(actions) {
  const byKey = new Map(), byId = new Map();
  for (const action of actions) {
    byId.set(action.id, action);
    for (const key of action.keys) byKey.set(key, action);
  }
  for (const button of document.querySelectorAll("[data-action]")) {
    const { label, keys, run } = byId.get(button.dataset.action);
    button.title = `${label} (${keys[0]})`;
    if (!button.textContent.trim() || button.classList.contains("icon")) button.setAttribute("aria-label", label);
    button.setAttribute("aria-keyshortcuts", keys.map((key) => key.replace("Ctrl", "Control")).join(" "));
    button.addEventListener("click", (event) => {
      run("");
      // After the mouse, Space belongs to the picture again; with the keyboard, the focus stays where it is.
      if (event.detail > 0) document.getElementById("view").focus({ preventScroll: true });
    });
  }
  addEventListener("keydown", (event) => {
    const name = nameOf(event);
    const action = byKey.get(name);
    if (!action || event.isComposing || taken(event.target, name)) return;
    event.preventDefault();
    if (event.repeat && action.once) return;
    action.run(name, event);
  });
  addEventListener("keyup", (event) => {
    const action = byKey.get(NAMES[event.key] ?? event.key);
    action?.release?.();
  });
}

/** The table of keys, into an element. */
export function list(actions, element) {
  const groups = Map.groupBy ? Map.groupBy(actions, ({ group }) => group) : new Map();
  if (!groups.size) for (const action of actions) groups.set(action.group, [...(groups.get(action.group) ?? []), action]);
  for (const [group, members] of groups) {
    const section = document.createElement("section"), title = document.createElement("h3");
    title.textContent = group;
    section.append(title);
    for (const { label, keys, shown } of members) {
      const line = document.createElement("p"), text = document.createElement("span"), marks = document.createElement("span");
      text.textContent = label;
      (shown ?? keys).forEach((key, i) => {
        const mark = document.createElement("kbd");
        mark.textContent = key;
        marks.append(...(i ? [" ", mark] : [mark]));
      });
      line.append(text, marks);
      section.append(line);
    }
    element.append(section);
  }
}
