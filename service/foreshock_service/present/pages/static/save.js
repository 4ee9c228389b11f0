// Saves a plot as PNG, or its numbers as CSV: a row for each x, a column for each trace, or the figure's own columns.

function download(address, name) {
  const anchor = document.createElement("a");
  anchor.href = address;
  anchor.download = name;
  anchor.click();
}

const quoted = (value) => (/[",\n]/.test(String(value)) ? `"${String(value).replaceAll('"', '""')}"` : value ?? "");
const joined = (lines) => lines.map((line) => line.map(quoted).join(",")).join("\n") + "\n";

function csvOf(specification) {
  if (specification.columns) {
    const columns = Object.values(specification.columns);
    return joined([Object.keys(specification.columns), ...columns[0].map((_, row) => columns.map((column) => column[row]))]);
  }
  const names = [], columns = [], places = new Map();
  for (const trace of specification.data) {
    if (trace.meta === "smooth" || !trace.x || !trace.y) continue;
    const column = new Map(trace.x.map((x, at) => [x, trace.y[at]]));
    names.push(trace.name ?? "");
    columns.push(column);
    for (const x of column.keys()) if (!places.has(x)) places.set(x, places.size);
  }
  const xs = [...places.keys()];
  if (xs.every((x) => typeof x === "number")) xs.sort((a, b) => a - b);
  const head = specification.layout.xaxis?.title?.text ?? "x";
  const lines = [[head, ...names], ...xs.map((x) => [x, ...columns.map((column) => column.get(x) ?? "")])];
  return joined(lines);
}

/** Saves the figure drawn in `element`; `kind` is "png" or "csv". */
export async function save(element, specification, kind) {
  const name = specification.title.replace(/[^A-Za-z0-9]+/g, "-").replace(/^-|-$/g, "").toLowerCase();
  if (kind === "csv") {
    const address = URL.createObjectURL(new Blob([csvOf(specification)], { type: "text/csv" }));
    download(address, `${name}.csv`);
    URL.revokeObjectURL(address);
    return;
  }
  // Plotly draws without a background; a picture needs the page's background.
  const background = getComputedStyle(element.closest(".card") ?? document.body).backgroundColor;
  const figure = { data: element.data, layout: { ...element.layout, paper_bgcolor: background }, config: {} };
  const svg = await window.Plotly.toImage(figure, { format: "svg", width: element.clientWidth, height: specification.height });
  const source = decodeURIComponent(svg.replace(/^data:image\/svg\+xml,/, ""));
  const address = URL.createObjectURL(new Blob([source], { type: "image/svg+xml" }));
  const image = new Image();
  image.src = address;
  await image.decode();
  const canvas = document.createElement("canvas");
  canvas.width = 2 * element.clientWidth;
  canvas.height = 2 * specification.height;
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  URL.revokeObjectURL(address);
  const blob = await new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
  const picture = URL.createObjectURL(blob);
  download(picture, `${name}.png`);
  setTimeout(() => URL.revokeObjectURL(picture), 10_000);
}
