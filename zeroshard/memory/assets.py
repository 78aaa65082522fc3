"""The style and the script of an HTML report, which are part of it. They fetch nothing."""

__all__ = ["SCRIPT", "STYLE"]

STYLE = """
:root { font-size: 94%; color-scheme: light dark; --ground: #fff; --raised: #f4f6f8; --ink: #1b1f24;
  --faint: #565f6b; --line: #d3d9e0; --mark: #b3124a; }
@media screen and (prefers-color-scheme: dark) { :root { --ground: #14171c; --raised: #1d2229;
  --ink: #e6e9ee; --faint: #a0a9b5; --line: #3a424d; --mark: #ff8fb3; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem clamp(.75rem, 3vw, 2.5rem) 3rem; max-width: 100rem;
  background: var(--ground); color: var(--ink); font: 1rem/1.45 system-ui, sans-serif;
  overflow-wrap: anywhere; -webkit-print-color-adjust: exact; print-color-adjust: exact; }
h1 { font-size: 1.6rem; line-height: 1.2; margin: .5rem 0; }
h2 { font-size: 1.2rem; margin: 2.2rem 0 .4rem; }
h3 { font-size: 1rem; margin: 1.2rem 0 .4rem; }
p { margin: .4rem 0; max-width: 60rem; }
a { color: inherit; }
.faint { color: var(--faint); font-size: .87rem; }
.definitions { position: absolute; }
.swatch { vertical-align: -2px; margin-right: .5em; border-radius: 3px; flex: none; }
.facts { display: flex; flex-wrap: wrap; gap: .2rem 1.4rem; margin: .4rem 0; }
.facts div { display: flex; gap: .45em; }
.facts dt { color: var(--faint); }
.facts dd { margin: 0; font-weight: 600; }
.legend { columns: 24rem; column-gap: 2rem; list-style: none; padding: 0; margin: .6rem 0; }
.legend li { break-inside: avoid; display: flex; align-items: baseline; padding: .1rem 0;
  font-size: .87rem; }
.legend .swatch { align-self: flex-start; margin-top: .28em; }
.bars { display: grid; gap: .3rem 1rem; margin: .8rem 0; }
.bars > div { display: contents; }
.bars .name { align-self: center; display: flex; flex-wrap: wrap; gap: 0 .6em; }
.bars .lane { align-self: center; position: relative; height: 1.7rem; margin: 0 6.5em .5rem 0; }
.bars .lane svg { display: block; }
.bars .total { position: absolute; top: 50%; transform: translateY(-50%); line-height: 1.2;
  margin-left: .4em; padding: 0 .15em; background: var(--ground); font-weight: 600;
  white-space: nowrap; }
.bars .limit { position: absolute; top: -.4rem; bottom: -.4rem; width: 0;
  border-left: 2px dashed var(--mark); }
.bars .short { color: var(--mark); font-weight: 600; white-space: nowrap; }
.bars .limit-name { height: 1.5rem; margin-bottom: 0; font-size: .87rem; color: var(--mark); }
.bars .limit-name span { position: absolute; white-space: nowrap; }
.report { border-top: 1px solid var(--line); margin-top: 2rem; }
.timeline { display: grid; gap: .5rem 2rem; margin: .8rem 0; }
.figure { align-self: start; display: grid; grid-template-columns: 5.4rem minmax(0, 1fr);
  margin: 0; }
.axis { position: relative; height: 300px; font-size: .8rem; color: var(--faint); }
.axis span { position: absolute; right: .6em; transform: translateY(-50%); white-space: nowrap; }
.plot { position: relative; height: 300px; box-shadow: 0 1px var(--faint);
  margin-bottom: .7rem; }
.plot > svg { position: absolute; inset: 0; width: 100%; height: 100%; }
.plot line { stroke: var(--line); }
.plot .outline { fill: none; stroke: var(--ink); stroke-width: 1px; stroke-opacity: .55;
  vector-effect: non-scaling-stroke; }
.plot line.peak { stroke: var(--mark); stroke-width: 1.5px; stroke-dasharray: 4 3; }
.flag { position: absolute; top: 0; padding: 0 .4em; font-size: .8rem; font-weight: 600;
  color: var(--mark); background: var(--ground); border-radius: 3px; white-space: nowrap; }
.left { transform: translateX(-100%); }
.pointer { position: absolute; inset: 0; cursor: crosshair; touch-action: pan-y; }
.pointer:focus-visible { outline: 2px solid var(--ink); outline-offset: 2px; }
.cursor { position: absolute; top: 0; bottom: 0; width: 0; border-left: 1.5px solid var(--ink); }
.phase { font-size: .8rem; line-height: 1.15rem; padding-right: .6em; text-align: right;
  color: var(--faint); white-space: nowrap; }
.band { height: 1.15rem; border-bottom: 1px solid var(--line); fill: var(--faint); }
.band svg { display: block; height: 100%; padding: 3px 0; }
.under { grid-column: 2; display: flex; justify-content: space-between; gap: 1em;
  font-size: .8rem; color: var(--faint); }
.moment { font-weight: 600; min-height: 2.9em; margin: 0 0 .3rem; }
.readout table { width: 100%; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .87rem; }
th, td { padding: .18rem .5rem; text-align: right; border-bottom: 1px solid var(--line); }
th { font-weight: 500; vertical-align: bottom; }
th[scope=row] { text-align: left; }
td { white-space: nowrap; }
td.none { color: var(--faint); }
tr.sum > * { font-weight: 700; }
tr.pointed > * { background: var(--raised); font-weight: 700; }
caption { text-align: left; padding-bottom: .3rem; color: var(--faint); }
.scroll { overflow-x: auto; max-width: 100%; margin: .6rem 0; }
.scroll th { min-width: 5.2rem; overflow-wrap: normal; }
.scroll th[scope=row] { min-width: 8.5rem; max-width: 18rem; position: sticky; left: 0;
  background: var(--ground); }
.notes { padding-left: 1.2rem; max-width: 60rem; }
@media (min-width: 48rem) {
  .bars { grid-template-columns: minmax(9rem, max-content) minmax(0, 1fr); }
  .bars .name { max-width: 26rem; }
  .bars .lane { margin-bottom: 0; }
  .timeline { grid-template-columns: minmax(0, 1fr) 19rem; }
}
@media (max-width: 47.99rem) {
  .bars .limit-name { order: -1; }
  .bars .name.empty { display: none; }
  .moment { min-height: 0; }
}
@media print {
  :root { font-size: 8.5pt; }
  body { padding: 0; }
  .timeline { grid-template-columns: minmax(0, 1fr) 14rem; }
  .figure, .bars > div, tr { break-inside: avoid; }
  .timeline { break-inside: avoid; }
  h2, h3 { break-after: avoid; }
  .scroll { overflow: visible; }
  .scroll th { min-width: 0; }
  .scroll th[scope=row] { min-width: 0; position: static; }
  th, td { padding: .1rem .25rem; }
  .hint, .pointer { display: none; }
}
"""

SCRIPT = """
"use strict";
const UNITS = [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]];
function fixed(value, digits) { // halves go to the even digit, as in the text of the page
  const scaled = value * 10 ** digits, down = Math.floor(scaled), rest = scaled - down;
  const rounded = rest > 0.5 || (rest === 0.5 && down % 2) ? down + 1 : down;
  return (rounded / 10 ** digits).toFixed(digits);
}
function gib(nbytes) {
  for (const [unit, size] of UNITS)
    if (nbytes >= 0.1 * size)
      return fixed(nbytes / size, nbytes < 10 * size ? 2 : 1) + " " + unit;
  return nbytes + " B";
}
function summed(steps) { let sum = 0; return steps.map(step => sum += step); }
function follow(timeline) {
  const data = JSON.parse(timeline.querySelector("script").textContent);
  const at = summed(data.at), held = data.held.map(summed);
  const pointer = timeline.querySelector(".pointer"), cursor = timeline.querySelector(".cursor");
  const moment = timeline.querySelector(".moment"), sum = timeline.querySelector("tr.sum td");
  const rows = data.names.map((_, number) => timeline.querySelector(`[data-row="${number}"]`));
  let shown = data.peak;
  function show(index, pointed) {
    shown = index;
    const where = data.places[data.where[index]], phase = data.phases[data.phase[index]];
    const total = held.reduce((all, own) => all + own[index], 0);
    const place = (index === data.peak ? "peak, event " : "event ") + at[index] + ", " + phase +
      (where ? " of " + where : "");
    moment.textContent = place;
    sum.textContent = gib(total);
    rows.forEach((row, number) => {
      row.lastElementChild.textContent = gib(held[number][index]);
      row.classList.toggle("pointed", number === pointed);
    });
    cursor.style.left = 100 * (at[index] - data.start) / (data.end - data.start) + "%";
    pointer.setAttribute("aria-valuenow", at[index]);
    pointer.setAttribute("aria-valuetext", place + ": " + gib(total));
  }
  function before(event) { // the last sample that begins at the event or before it
    let low = 0, high = at.length - 1;
    while (low < high) {
      const middle = Math.ceil((low + high) / 2);
      if (at[middle] <= event) low = middle; else high = middle - 1;
    }
    return low;
  }
  function under(index, nbytes) {
    let top = 0;
    return held.findIndex(own => (top += own[index]) > nbytes);
  }
  function rest() { cursor.hidden = true; show(data.peak, -1); }
  function move(event) {
    const box = pointer.getBoundingClientRect();
    const x = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
    const index = before(data.start + x * (data.end - data.start));
    cursor.hidden = false;
    show(index, under(index, (1 - (event.clientY - box.top) / box.height) * data.top));
  }
  const leaps = { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1, Home: -at.length,
    End: at.length, PageUp: Math.ceil(at.length / 20), PageDown: -Math.ceil(at.length / 20) };
  pointer.addEventListener("pointermove", move);
  pointer.addEventListener("pointerdown", move);
  pointer.addEventListener("pointerleave", rest);
  pointer.addEventListener("focus", () => { cursor.hidden = false; });
  pointer.addEventListener("blur", rest);
  pointer.addEventListener("keydown", event => {
    if (event.key === "Escape") { rest(); return; }
    if (!(event.key in leaps) || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    cursor.hidden = false;
    show(Math.min(at.length - 1, Math.max(0, shown + leaps[event.key])), -1);
  });
  pointer.hidden = false;
  timeline.querySelector(".hint").hidden = false;
  rest();
}
document.querySelectorAll(".timeline").forEach(follow);
"""
