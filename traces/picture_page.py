"""The frame of the page that `traces.picture` writes: markup with {places}, style, and the script of the hover."""

MARKUP = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>Block occupancy: {title}</title><style>{style}</style></head><body>
<svg width="0" height="0" style="position:absolute"><defs>{patterns}</defs></svg>
<h1>Who holds which block, and when</h1>
<p class="lead">Each row of a picture is one block of the KV cache, from left to right is time. Below it, on the same
time axis: how many blocks are in each state, and how many requests run and wait. Point at a picture to read it.</p>
<p class="legend">{legend}</p>
<main>{panels}</main>
<div id="tip" hidden></div>
<script>const LOOKS = {looks};{script}</script>
</body></html>
"""

STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #5b6470; --paper: #ffffff;
  --edge: #c6ccd4; --free: #e4e7ec; --alarm: #b00020; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8eaed; --soft: #a3abb6; --paper: #14171b; --edge: #3b424b;
    --free: #272d35; --alarm: #ff6b7d; } }
body { margin: 24px; background: var(--paper); color: var(--ink); font: 14px/1.45 system-ui, sans-serif; }
h1 { font-size: 20px; margin: 0 0 4px; } h2 { font-size: 16px; margin: 0; }
.lead { color: var(--soft); max-width: 80ch; margin: 0 0 10px; }
.legend, .figures { display: flex; flex-wrap: wrap; gap: 4px 16px; margin: 0 0 12px; }
.legend span { display: inline-flex; align-items: center; gap: 6px; }
.figures { color: var(--soft); margin: 2px 0 4px; }
.figures b { color: var(--ink); } .note { color: var(--alarm); margin: 0; }
main { display: grid; gap: 22px 28px; grid-template-columns: repeat(auto-fit, minmax(min(100%, 480px), 1fr)); }
section svg { width: 100%; height: auto; display: block; } image { image-rendering: pixelated; }
.frame { fill: none; stroke: var(--edge); } .grid { stroke: var(--edge); }
.tick, .axis { font-size: 10.5px; fill: var(--soft); } .title { font-size: 11.5px; fill: var(--ink); }
.line { fill: none; stroke: var(--ink); stroke-width: 1.4; } .waiting { stroke-dasharray: 5 3; stroke: #b5651d; }
.waiting_for_slot { stroke-dasharray: 1.5 2.5; stroke: #0072b2; } .preempted { fill: var(--ink); }
.free { fill: var(--free); }
.full { fill: var(--alarm); } .cursor { fill: var(--ink); opacity: 0; pointer-events: none; }
#tip { position: fixed; pointer-events: none; background: var(--paper); border: 1px solid var(--edge); padding: 6px 9px;
  border-radius: 6px; font-size: 12.5px; white-space: pre-line; box-shadow: 0 2px 10px #0003; max-width: 280px; }
"""

SCRIPT = """
const tip = document.getElementById("tip");
for (const svg of document.querySelectorAll("svg[data-run]")) {
  const run = JSON.parse(svg.dataset.run), [left, top, width, height] = run.heat;
  const cursor = svg.querySelector(".cursor"), image = new Image(), canvas = document.createElement("canvas");
  const brush = canvas.getContext("2d", { willReadFrequently: true });
  image.onload = () => { canvas.width = image.width; canvas.height = image.height; brush.drawImage(image, 0, 0); };
  image.src = svg.querySelector("image").getAttribute("href");
  const stateAt = (across, down) => {
    const x = Math.min(image.width - 1, Math.floor(across * image.width));
    const y = Math.min(image.height - 1, Math.floor(down * image.height));
    const [r, g, b, seen] = brush.getImageData(x, y, 1, 1).data;
    if (!seen) return LOOKS[0][0];
    const colour = "#" + [r, g, b].map(part => part.toString(16).padStart(2, "0")).join("");
    const look = LOOKS.find(look => look.includes(colour));
    return look ? look[0] : "";
  };
  svg.addEventListener("mousemove", event => {
    const point = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
    const across = (point.x - left) / width, down = (point.y - top) / height, time = across * run.until;
    if (across < 0 || across >= 1 || time > run.last) { tip.hidden = true; cursor.style.opacity = 0; return; }
    const bin = Math.floor(across * run.running.length), lines = [time.toFixed(2) + " s"];
    if (down >= 0 && down < 1)
      lines.push("block " + Math.floor(down * run.blocks) + ": " + stateAt(time / run.last, down), "");
    LOOKS.forEach((look, state) => { if (run.counts[bin][state]) lines.push(run.counts[bin][state] + " " + look[0]); });
    lines.push("", run.running[bin] + " running, " + run.waiting[bin] + " waiting", run.tokens[bin] + " tokens/s");
    if (run.preempted[bin]) lines.push("preemptions: " + run.preempted[bin]);
    if (run.compressed[bin]) lines.push("compressions started: " + run.compressed[bin]);
    tip.textContent = lines.join("\\n"); tip.hidden = false;
    tip.style.left = Math.min(event.clientX + 14, innerWidth - 290) + "px";
    tip.style.top = Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8) + "px";
    cursor.setAttribute("x", point.x); cursor.style.opacity = 0.6;
  });
  svg.addEventListener("mouseleave", () => { tip.hidden = true; cursor.style.opacity = 0; });
}
"""
