// Lines over time, drawn by uPlot, with a legend that says the newest values or those under the pointer.
//
// Invariant: a value that is not known is a gap, never zero.
import { useEffect, useRef, useState } from "preact/hooks";
import type uPlot from "uplot";
import { bytes, clock, count, percent } from "./format.ts";
import { Notice } from "./parts.tsx";
import { loadPlotLibrary, plotLibrary } from "./plot-library.ts";
import { colours } from "./theme.ts";

export interface Line {
  name: string;
  /** Plane whose colour the line has. */
  plane: "guest" | "ram" | "overflow" | "base" | "accent";
  values: (number | null)[];
  isArea?: boolean;
}

export type Unit = "bytes" | "bytes/s" | "percent" | "count/s";

const TEXT: Record<Unit, (n: number) => string> = {
  bytes,
  "bytes/s": (n) => `${bytes(n)}/s`,
  percent: (n) => percent(n),
  "count/s": (n) => `${n < 10 ? n.toFixed(1) : count(n)}/s`,
};
/** Steps of an axis of bytes. */
const BINARY = Array.from({ length: 50 }, (_, i) => 2 ** i);
const HEIGHT = 168;

export interface ChartProps {
  title: string;
  /** Seconds since the epoch, one for each value. */
  times: number[];
  lines: Line[];
  unit: Unit;
  /** Seconds that the chart is wide; it ends with the last time. */
  span: number;
}

export function Chart({ title, times, lines, unit, span }: ChartProps) {
  const box = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | null>(null);
  const [at, setAt] = useState<number | null>(null);
  const library = plotLibrary.value;
  const Plot = library.is === "loaded" ? library.of : null;
  const shape = lines.map((l) => `${l.name}/${l.plane}`).join() + unit + span + colours.value;
  const data: uPlot.AlignedData = [times, ...lines.map((l) => l.values)];

  useEffect(() => {
    void loadPlotLibrary();
  }, []);

  // New data is given to the plot below, without a new one
  useEffect(() => {
    const el = box.current;
    if (!el || !Plot) return;
    const style = getComputedStyle(el);
    const colour = (name: string) => style.getPropertyValue(`--${name}`).trim();
    const isBytes = unit === "bytes" || unit === "bytes/s";
    const axis = { stroke: colour("muted"), font: `11px ${style.fontFamily}`, ticks: { show: false } };
    const grid = { stroke: colour("line"), width: 1 };
    const made = new Plot(
      {
        width: Math.max(200, el.clientWidth),
        height: HEIGHT,
        legend: { show: false },
        cursor: { y: false, points: { size: 6 } },
        scales: {
          x: { range: (_u, _min, max) => [(max || Date.now() / 1000) - span, max || Date.now() / 1000] },
          y: {
            range: (_u, _min, max) => [
              0,
              unit === "percent"
                ? Math.max(0.01, Math.min(1, max * 1.15))
                : Math.max(max || 0, isBytes ? 1024 : 1) * 1.08,
            ],
          },
        },
        axes: [
          {
            ...axis,
            grid: { show: false },
            size: 26,
            space: 80,
            // Within minutes, the seconds tell moments apart.
            values: (u, splits) => {
              const isShort = (u.scales.x?.max ?? 0) - (u.scales.x?.min ?? 0) < 300;
              return splits.map((s) => clock(s * 1000).slice(11, isShort ? 19 : 16));
            },
          },
          {
            ...axis,
            grid,
            size: 78,
            gap: 6,
            ...(isBytes ? { incrs: BINARY } : {}),
            values: (_u, splits) => splits.map((s) => TEXT[unit](s)),
          },
        ],
        series: [
          {},
          ...lines.map((l) => ({
            stroke: colour(l.plane),
            width: 1.5,
            ...(l.isArea ? { fill: `${colour(l.plane)}22` } : {}),
            points: { show: false },
          })),
        ],
        hooks: { setCursor: [(u: uPlot) => setAt(u.cursor.idx ?? null)] },
      },
      data,
      el,
    );
    plot.current = made;
    const observer = new ResizeObserver(() => {
      if (el.clientWidth > 0 && el.clientWidth !== made.width)
        made.setSize({ width: el.clientWidth, height: HEIGHT });
    });
    observer.observe(el);
    return () => {
      observer.disconnect();
      made.destroy();
      plot.current = null;
    };
  }, [shape, Plot]);

  useEffect(() => {
    plot.current?.setData(data);
  });

  const index = at ?? times.length - 1;
  const value = (l: Line) => {
    const n = l.values[index];
    return n == null ? "-" : TEXT[unit](n);
  };
  const said = lines.map((l) => `${l.name} ${value(l)}`).join(", ");
  return (
    <figure class="chart">
      <figcaption>
        <span class="chart-title">{title}</span>
        <ul class="legend">
          {lines.map((l) => (
            <li key={l.name}>
              <span class={`swatch ${l.plane}`} aria-hidden="true" />
              {l.name} <strong>{value(l)}</strong>
            </li>
          ))}
        </ul>
      </figcaption>
      {library.is === "failed" ? (
        <Notice tone="warning">
          The drawing of charts could not be loaded.{" "}
          <button type="button" onClick={() => void loadPlotLibrary()}>
            Try again
          </button>
        </Notice>
      ) : null}
      <div class="plot" ref={box} role="img" aria-label={`${title}. Newest: ${said}`} />
    </figure>
  );
}
