// Nothing here is needed to read the page: tips without delay, a filter, and details in print.
(() => {
  const tip = document.createElement("div");
  tip.className = "tip";
  tip.hidden = true;
  document.body.append(tip);
  for (const title of document.querySelectorAll("svg :not(svg) > title, svg.cells > title")) {
    if (title.parentNode.localName !== "svg") title.parentNode.dataset.tip = title.textContent;
    title.remove();
  }
  const stepAt = (row, x) => {
    const values = row.dataset.values.split(" ");
    const box = row.getBoundingClientRect();
    const step = Math.floor((values.length * (x - box.left)) / box.width);
    const ranks = values[Math.min(Math.max(step, 0), values.length - 1)];
    return `${row.dataset.name}, step ${step}: ${ranks} of ${row.dataset.world} ranks`;
  };
  document.addEventListener("pointermove", (event) => {
    const row = event.target.closest?.("svg[data-values]");
    const text = row ? stepAt(row, event.clientX) : event.target.closest?.("[data-tip]")?.dataset.tip;
    tip.hidden = !text;
    if (!text) return;
    tip.textContent = text;
    const left = Math.min(event.clientX + 12, innerWidth - tip.offsetWidth - 8);
    const below = event.clientY + 18 + tip.offsetHeight < innerHeight;
    tip.style.left = `${Math.max(left, 4)}px`;
    tip.style.top = `${event.clientY + (below ? 16 : -tip.offsetHeight - 10)}px`;
  });

  const buttons = [...document.querySelectorAll(".filter button")];
  if (buttons.length > 1) buttons[0].parentNode.hidden = false;
  for (const button of buttons) {
    button.addEventListener("click", () => {
      const wanted = button.dataset.show;
      for (const other of buttons) other.setAttribute("aria-pressed", String(other === button));
      for (const part of document.querySelectorAll("[data-statuses]")) {
        part.hidden = wanted !== "" && !part.dataset.statuses.split(" ").includes(wanted);
      }
    });
  }

  const closed = () => [...document.querySelectorAll("details:not([open])")];
  let opened = [];
  addEventListener("beforeprint", () => {
    opened = closed();
    for (const details of opened) details.open = true;
  });
  addEventListener("afterprint", () => {
    for (const details of opened) details.open = false;
  });
})();
