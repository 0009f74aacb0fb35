"""The style of a page: one style sheet for light, dark and print, and a short script for tooltips and search.

In:     nothing.
Out:    `STYLE`, `SCRIPT`, to be put into a page; both affect only elements of class `autopar-plan`.
Method: colours are variables; dark mode follows the reader's system or notebook. The page works without the script:
        tooltips are then titles.
"""

from __future__ import annotations

_LIGHT = """--bg:#fff; --ink:#1d2329; --soft:#66707c; --line:#dde1e6; --card:#f5f6f8; --wait:#edf0f3; --on:#fff;
 --f:#3f7fd6; --b:#2b9a74; --w:#86cdb0; --u:#dd9933; --init:#9aa3af; --transfer:#b565a7; --gather:#c65f94; --scatter:#8a63c4;
 --reduce:#d0605e; --alltoall:#a8557f; --permute:#77558f; --area:#bcd3f2;
 --stroke:#3f7fd6; --budget:#c23b33; --whole:#c9cfd7;"""
_DARK = """--bg:#14181d; --ink:#e8ebef; --soft:#9aa5b1; --line:#343c46; --card:#1d232a; --wait:#242b33; --on:#0f1317;
 --f:#6aa5f2; --b:#4cc294; --w:#2e7a5c; --u:#e8b35a; --init:#7d8896; --transfer:#cf8bc4; --gather:#e089b5; --scatter:#ac8ae0;
 --reduce:#e98683; --alltoall:#cc7fa5; --permute:#a284ba; --area:#25405f;
 --stroke:#6aa5f2; --budget:#f0766d; --whole:#4a535e;"""
_PARTS = ("#3f7fd6", "#dd9933", "#2b9a74", "#8a63c4", "#d0605e", "#4fb3bf", "#b08968", "#c65f94", "#9aa3af")
_PIECES = (
    *("#3f7fd6", "#dd9933", "#2b9a74", "#d0605e", "#8a63c4", "#4fb3bf"),
    *("#c65f94", "#a3b144", "#7088a8", "#b08968", "#5b6ee1", "#6fae5c"),
)
_KINDS = {
    "F": "f",
    "M": "init",
    "B": "b",
    "W": "w",
    "U": "u",
    "init": "init",
    "transfer": "transfer",
    "all-gather": "gather",
    "reduce-scatter": "scatter",
    "all-reduce": "reduce",
    "all-to-all": "alltoall",
    "ragged-all-to-all": "alltoall",
    "collective-permute": "permute",
    "wait": "wait",
}


def _fills() -> str:
    """CSS rules with the fill (for shapes) and background (for swatches in text) of each colour."""
    pairs = [(f"k-{kind}", f"var(--{name})") for kind, name in _KINDS.items()]
    pairs += [(f"c{k}", colour) for k, colour in enumerate(_PARTS)]
    pairs += [(f"p{k}", colour) for k, colour in enumerate(_PIECES)]
    pairs.append(("whole", "var(--whole)"))
    return "\n".join(f".autopar-plan .{name} {{ fill:{colour}; background:{colour} }}" for name, colour in pairs)


STYLE = f"""<style>
.autopar-plan {{ {_LIGHT} }}
@media (prefers-color-scheme: dark) {{ .autopar-plan {{ {_DARK} }} }}
[data-jp-theme-light="true"] .autopar-plan {{ {_LIGHT} }}
[data-jp-theme-light="false"] .autopar-plan {{ {_DARK} }}
@media print {{ .autopar-plan {{ {_LIGHT} }} .autopar-plan .find {{ display:none }} }}
body.autopar {{ margin:0; background:#fff }}
@media (prefers-color-scheme: dark) {{ body.autopar {{ background:#14181d }} }}
@media print {{ body.autopar {{ background:#fff }} }}
.autopar-plan {{ font:13px/1.45 system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif;
 color:var(--ink); background:var(--bg); max-width:960px;
 margin:0 auto; padding:18px 22px; print-color-adjust:exact; -webkit-print-color-adjust:exact }}
.autopar-plan h1 {{ font-size:20px; margin:0 0 2px; font-weight:650 }}
.autopar-plan h2 {{ font-size:15px; margin:30px 0 8px; font-weight:650 }}
.autopar-plan h3 {{ font-size:13px; margin:0 0 4px; font-weight:600 }}
.autopar-plan p {{ margin:4px 0 }}
.autopar-plan h1, .autopar-plan p, .autopar-plan td {{ overflow-wrap:anywhere }}
.autopar-plan section {{ break-inside:avoid-page }}
.autopar-plan svg {{ display:block; width:100%; height:auto }}
.autopar-plan td svg {{ display:inline-block; width:auto; vertical-align:middle; overflow:visible }}
.autopar-plan svg text {{ font-size:12px; fill:var(--ink); font-family:inherit }}
.autopar-plan svg text.small {{ font-size:11px }}
.autopar-plan svg text.strong {{ font-weight:600 }}
.autopar-plan svg text.soft, .autopar-plan .soft {{ fill:var(--soft); color:var(--soft) }}
{_fills()}
.autopar-plan svg text.on {{ fill:var(--on); background:none; font-size:11px; pointer-events:none }}
.autopar-plan svg text.on.k-W, .autopar-plan svg text.on.k-wait {{ fill:var(--ink) }}
.autopar-plan .pale {{ opacity:.72 }}
.autopar-plan line.grid {{ stroke:var(--line); stroke-width:1 }}
.autopar-plan line.budget {{ stroke:var(--budget); stroke-width:1.5; stroke-dasharray:5 4 }}
.autopar-plan svg text.budget {{ fill:var(--budget) }}
.autopar-plan .area {{ fill:var(--area); stroke:var(--stroke); stroke-width:1.2 }}
.autopar-plan .mark {{ fill:var(--budget) }}
.autopar-plan .hatch {{ stroke:var(--bg); stroke-width:1.6; pointer-events:none }}
.autopar-plan .cards {{ display:grid; grid-template-columns:repeat(auto-fit, minmax(135px, 1fr)); gap:10px; margin:14px 0 4px }}
.autopar-plan .card {{ background:var(--card); border-radius:8px; padding:9px 12px }}
.autopar-plan .card b {{ display:block; font-size:19px; font-weight:650 }}
.autopar-plan .legend {{ margin:6px 0 2px }}
.autopar-plan .key {{ display:inline-block; margin-right:16px; white-space:nowrap }}
.autopar-plan .swatch {{ display:inline-block; width:11px; height:11px; border-radius:3px; margin-right:6px;
 vertical-align:-1px }}
.autopar-plan .memory {{ display:flex; flex-wrap:wrap; gap:8px 24px; margin-bottom:16px; align-items:center }}
.autopar-plan .memory > div {{ flex:1 1 330px; min-width:0; max-width:560px }}
.autopar-plan .memory > .parts {{ flex:0 1 340px }}
.autopar-plan table {{ border-collapse:collapse; margin:4px 0 8px; font-size:13px; color:inherit }}
.autopar-plan th, .autopar-plan td {{ text-align:left; padding:2px 14px 2px 0; vertical-align:top; background:none; border:0 }}
.autopar-plan thead th {{ border-bottom:1px solid var(--line); font-weight:600 }}
.autopar-plan td.number, .autopar-plan th.number {{ text-align:right; white-space:nowrap }}
.autopar-plan td.name {{ white-space:nowrap }}
.autopar-plan .code, .autopar-plan code {{ font-family:ui-monospace, "DejaVu Sans Mono", monospace; font-size:12px }}
.autopar-plan .parts table {{ width:100% }}
.autopar-plan .tensors {{ width:100% }}
.autopar-plan .tensors td {{ border-bottom:1px solid var(--line); padding:5px 14px 5px 0; overflow-wrap:anywhere }}
.autopar-plan .tensors td:first-child, .autopar-plan .tensors td:nth-child(4) {{ white-space:nowrap }}
.autopar-plan .tensors details p {{ font-family:system-ui, sans-serif; max-width:46em }}
.autopar-plan .find {{ font:inherit; color:inherit; background:var(--card); border:1px solid var(--line); border-radius:6px;
 padding:5px 10px; width:min(360px, 90%); margin-bottom:6px }}
.autopar-plan .wide {{ overflow-x:auto }}
.autopar-plan summary {{ cursor:pointer }}
.autopar-plan .model {{ display:flex; flex-wrap:wrap; gap:10px 0; align-items:stretch }}
.autopar-plan .stage {{ background:var(--card); border-radius:8px; padding:10px 12px; flex:1 1 150px; min-width:0 }}
.autopar-plan .stage:only-child .blocks {{ columns:3 220px; column-gap:24px }}
.autopar-plan .block {{ break-inside:avoid }}
.autopar-plan .stage .code {{ font-size:11px; overflow-wrap:anywhere }}
.autopar-plan .block {{ border-top:1px solid var(--line); padding:4px 0 6px; overflow-wrap:anywhere }}
.autopar-plan .block b, .autopar-plan .block span {{ display:block; font-size:12px }}
.autopar-plan .block b {{ font-weight:600 }}
.autopar-plan .fill {{ display:block; height:4px; border-radius:2px; background:var(--f); margin-top:3px }}
.autopar-plan .border {{ display:flex; flex-direction:column; justify-content:center; gap:12px; padding:0 8px; font-size:11px;
 color:var(--soft); text-align:center }}
.autopar-plan .border b {{ display:block; font-size:16px; line-height:1; color:var(--ink) }}
.autopar-plan .both > h3 {{ margin:10px 0 2px; color:var(--soft); font-weight:600 }}
.autopar-plan .tip {{ position:fixed; z-index:9; pointer-events:none; white-space:pre-line;
 background:var(--ink); color:var(--bg); padding:5px 9px; border-radius:6px; font-size:12px; max-width:340px; display:none }}
</style>"""

SCRIPT = """<script>
document.querySelectorAll('.autopar-plan:not([data-live])').forEach(page => {
  page.dataset.live = '1';
  const tip = page.appendChild(Object.assign(document.createElement('div'), {className: 'tip'}));
  page.addEventListener('mousemove', event => {
    const over = event.target.closest('rect, circle, [data-tip]');
    const title = over && over.querySelector('title');
    if (title) { over.dataset.tip = title.textContent; title.remove(); }
    const words = over && over.dataset.tip;
    tip.style.display = words ? 'block' : 'none';
    if (!words) return;
    tip.textContent = words;
    tip.style.left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8) + 'px';
    tip.style.top = Math.min(event.clientY + 16, innerHeight - tip.offsetHeight - 8) + 'px';
  });
  page.addEventListener('mouseleave', () => { tip.style.display = 'none'; });
  page.querySelectorAll('.find').forEach(find => find.addEventListener('input', () => {
    const words = find.value.toLowerCase().split(/\\s+/);
    find.parentElement.querySelectorAll('.tensors tbody tr').forEach(row => {
      const text = row.textContent.toLowerCase();
      row.style.display = words.every(word => text.includes(word)) ? '' : 'none';
    });
  }));
});
</script>"""
