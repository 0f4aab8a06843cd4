// Pictures of a disk: its two tiers, how much goes where, small lines of the last minutes, and the diagram of the planes.
//
// Invariant: guest, RAM, overflow and base have the same colour everywhere, and a word or a place beside it.

import type { Levels } from "../api/client.ts";
import type { Rates, Sample } from "../state/moments.ts";
import { bytes, percent, rate } from "./format.ts";
import { useWidth } from "./parts.tsx";

export type Level = "normal" | "warning" | "critical" | "full";

/** The level of a disk, or the worst of several, as the daemon counts it. */
export function levelOf(levels: Levels): Level {
  if (levels.full) return "full";
  if (levels.critical) return "critical";
  return levels.warning ? "warning" : "normal";
}

const share = (used: number, limit: number) => (limit > 0 ? Math.min(1, used / limit) : 0);

/** Both tiers in a cell of a table: RAM above, overflow below. `drawTiers` says how full they are. */
export function TierBars() {
  return (
    <svg class="tier-bars" viewBox="0 0 64 14" role="img">
      <rect class="track" x="0" y="0" width="64" height="6" rx="1.5" />
      <rect class="fill ram" x="0" y="0" width="0" height="6" rx="1.5" />
      <rect class="track" x="0" y="8" width="64" height="6" rx="1.5" />
      <rect class="fill overflow" x="0" y="8" width="0" height="6" rx="1.5" />
    </svg>
  );
}

/** Changes an attribute, if it is another one: to set one costs a look at all that depends on it. */
function set(element: Element | null | undefined, name: string, value: string): void {
  if (element?.getAttribute(name) !== value) element?.setAttribute(name, value);
}

/** Shows levels in bars that are drawn. */
export function drawTiers(levels: Required<Levels>, bars: Element | null | undefined): void {
  const ram = share(levels.ram_used_bytes, levels.ram_limit_bytes);
  const overflow = share(levels.overflow_used_bytes, levels.overflow_limit_bytes);
  set(bars, "aria-label", `RAM tier ${percent(ram, 0)}, overflow ${percent(overflow, 0)}`);
  // To a tenth of a pixel.
  set(bars?.querySelector(".ram"), "width", (64 * ram).toFixed(1));
  set(bars?.querySelector(".overflow"), "width", (64 * overflow).toFixed(1));
}

/** One tier as a gauge with its figures. */
export function Gauge({
  name,
  plane,
  used,
  limit,
  note,
}: {
  name: string;
  plane: string;
  used: number;
  limit: number;
  note?: string;
}) {
  const part = share(used, limit);
  return (
    <div class="gauge">
      <div class="gauge-head">
        <span class={`swatch ${plane}`} aria-hidden="true" />
        <span>{name}</span>
        <strong>{limit > 0 ? percent(part) : "none"}</strong>
      </div>
      <svg viewBox="0 0 200 8" preserveAspectRatio="none" aria-hidden="true">
        <rect class="track" width="200" height="8" rx="2" />
        <rect class={`fill ${plane}`} width={200 * part} height="8" rx="2" />
      </svg>
      <div class="gauge-foot">
        {bytes(used)} of {limit > 0 ? bytes(limit) : "no limit"}
        {note ? ` \u00b7 ${note}` : ""}
      </div>
    </div>
  );
}

export interface Segment {
  name: string;
  value: number;
  kind: string;
  text?: string;
}

/** A bar of a whole with its parts, and the legend that names them. */
export function StackedBar({
  segments,
  whole,
  label,
}: {
  segments: Segment[];
  whole: number;
  label: string;
}) {
  let x = 0;
  const all = Math.max(
    whole,
    segments.reduce((sum, s) => sum + s.value, 0),
    1,
  );
  return (
    <figure class="stacked" aria-label={label}>
      <svg viewBox="0 0 1000 20" preserveAspectRatio="none" aria-hidden="true">
        <rect class="track" width="1000" height="20" />
        {segments.map((s) => {
          const width = (1000 * s.value) / all;
          const rect = <rect key={s.name} class={`fill ${s.kind}`} x={x} width={width} height="20" />;
          x += width;
          return rect;
        })}
      </svg>
      <ul class="legend">
        {segments.map((s) => (
          <li key={s.name}>
            <span class={`swatch ${s.kind}`} aria-hidden="true" />
            {s.name} <strong>{s.text ?? bytes(s.value)}</strong>
          </li>
        ))}
      </ul>
    </figure>
  );
}

/** Seconds that the small pictures show. */
const SPARK_SECONDS = 600;

/** What was written in the last ten minutes: RAM tier and overflow, one upon the other. */
export function Spark({
  samples,
  label,
  width = 96,
  height = 20,
}: {
  samples: Sample[];
  label: string;
  width?: number;
  height?: number;
}) {
  const end = samples.at(-1)?.time ?? 0;
  const shown = samples.filter((s) => s.time > end - SPARK_SECONDS);
  const most = Math.max(1, ...shown.map((s) => s.ramWritten + s.overflowWritten));
  const x = (s: Sample) => (width - ((end - s.time) / SPARK_SECONDS) * width).toFixed(1);
  const y = (v: number) => (height - (v / most) * (height - 1)).toFixed(1);
  const area = (from: (s: Sample) => number, to: (s: Sample) => number) => {
    const up = shown.map((s) => `${x(s)},${y(to(s))}`);
    const down = shown.map((s) => `${x(s)},${y(from(s))}`).reverse();
    return `M${[...up, ...down].join("L")}Z`;
  };
  const peak = most > 1 ? `peak ${rate(most)}` : "nothing written";
  return (
    <svg
      class="spark"
      viewBox={`0 0 ${width} ${height}`}
      preserveAspectRatio="none"
      role="img"
      aria-label={`${label}: ${peak}`}
    >
      <line class="axis" x1="0" x2={width} y1={height - 0.5} y2={height - 0.5} />
      {shown.length > 1 && most > 1 ? (
        <>
          <path
            class="fill ram"
            d={area(
              () => 0,
              (s) => s.ramWritten,
            )}
          />
          <path
            class="fill overflow"
            d={area(
              (s) => s.ramWritten,
              (s) => s.ramWritten + s.overflowWritten,
            )}
          />
        </>
      ) : null}
    </svg>
  );
}

/** The thickness of an arrow: 1 for nothing, more for each factor of ten. */
function thickness(bytesPerSecond: number): number {
  return bytesPerSecond < 1 ? 1 : Math.min(6, 1 + Math.log10(bytesPerSecond / 1000 + 1));
}

function Arrow({
  x1,
  y1,
  x2,
  y2,
  value,
  plane,
  text,
  at,
}: {
  x1: number;
  y1: number;
  x2: number;
  y2: number;
  value: number;
  plane: string;
  text: string;
  at: [number, number, "start" | "middle" | "end"];
}) {
  const angle = Math.atan2(y2 - y1, x2 - x1);
  const tip = (turn: number) => `${x2 - 7 * Math.cos(angle + turn)},${y2 - 7 * Math.sin(angle + turn)}`;
  return (
    <g class={`arrow ${plane}${value >= 1 ? " on" : ""}`}>
      <line
        x1={x1}
        y1={y1}
        x2={x2 - 4 * Math.cos(angle)}
        y2={y2 - 4 * Math.sin(angle)}
        stroke-width={thickness(value)}
      />
      <polygon points={`${x2},${y2} ${tip(0.5)} ${tip(-0.5)}`} />
      <text x={at[0]} y={at[1]} text-anchor={at[2]}>
        {text}
      </text>
    </g>
  );
}

/** What the plane of the overflow is in a mode: modes without a write cache write to another file there. */
export function overflowName(mode: string): string {
  const files: Record<string, string> = {
    direct: "Difference file",
    persistent: "Kept file",
    ephemeral: "Private copy",
  };
  return files[mode] ?? "Overflow";
}

/** Where the I/O of a disk goes now: guest, RAM tier, overflow and base image, with the rates along the arrows. */
export function PlaneDiagram({
  levels,
  rates,
  mode,
  image,
}: {
  levels: Required<Levels>;
  rates: Rates | null;
  mode: string;
  image: string;
}) {
  const hasRam = levels.ram_limit_bytes > 0;
  const r = rates;
  const value = (n: number | undefined) => n ?? 0;
  const say = (n: number | undefined) => (n === undefined ? "-" : rate(n));
  const toOverflow = value(r?.overflow.written);
  const description = r
    ? `The guest writes ${rate(r.guest.written)} and reads ${rate(r.guest.read)}. RAM tier: ${rate(r.ram.written)} written, ${rate(r.ram.read)} read. Overflow: ${rate(toOverflow)} written, ${rate(r.overflow.read)} read. Base image: ${rate(r.base.read)} read.`
    : "Rates are shown as soon as there are two moments to compare.";
  const [outer, width] = useWidth<HTMLDivElement>(480);
  const isNarrow = width < 460;
  const W = isNarrow ? 346 : 480;
  const guest = isNarrow ? 88 : 116;
  const boxWidth = isNarrow ? 150 : 190;
  const left = W - boxWidth - 1;
  const near = guest + 4;
  const far = left - 2;
  const middle = (near + far) / 2;
  const down = left + boxWidth / 2;
  const box = (y: number, plane: string, title: string, line: string, part: number | null) => (
    <g class={`plane ${plane}`}>
      <rect class="box" x={left} y={y} width={boxWidth} height="64" rx="4" />
      <rect class="edge" x={left} y={y} width="5" height="64" rx="2" />
      <text class="title" x={left + 16} y={y + 22}>
        {title}
      </text>
      <text class="line" x={left + 16} y={y + 39}>
        {line}
      </text>
      {part === null ? null : (
        <>
          <rect class="track" x={left + 16} y={y + 48} width={boxWidth - 28} height="6" rx="1.5" />
          <rect
            class={`fill ${plane}`}
            x={left + 16}
            y={y + 48}
            width={(boxWidth - 28) * part}
            height="6"
            rx="1.5"
          />
        </>
      )}
    </g>
  );
  return (
    <div ref={outer}>
      <svg class="planes" viewBox={`0 0 ${W} 312`} role="img" aria-label={description}>
        <g class="plane guest">
          <rect class="box" x="1" y="16" width={guest} height="280" rx="4" />
          <rect class="edge" x={guest - 4} y="16" width="5" height="280" rx="2" />
          <text class="title" x="14" y="40">
            Guest
          </text>
          <text class="line" x="14" y="60">
            writes
          </text>
          <text class="figure" x="14" y="77">
            {say(r?.guest.written)}
          </text>
          <text class="line" x="14" y="100">
            reads
          </text>
          <text class="figure" x="14" y="117">
            {say(r?.guest.read)}
          </text>
          <text class="line" x="14" y="140">
            requests
          </text>
          <text class="figure" x="14" y="157">
            {r ? `${Math.round(r.guest.reads + r.guest.writes)}/s` : "-"}
          </text>
        </g>
        {box(
          16,
          "ram",
          hasRam ? "RAM tier" : "no RAM tier",
          hasRam ? `${bytes(levels.ram_used_bytes)} of ${bytes(levels.ram_limit_bytes)}` : `mode ${mode}`,
          hasRam ? share(levels.ram_used_bytes, levels.ram_limit_bytes) : null,
        )}
        {box(
          124,
          "overflow",
          overflowName(mode),
          levels.overflow_limit_bytes > 0
            ? `${bytes(levels.overflow_used_bytes)} of ${bytes(levels.overflow_limit_bytes)}`
            : `${bytes(levels.overflow_used_bytes)}`,
          levels.overflow_limit_bytes > 0
            ? share(levels.overflow_used_bytes, levels.overflow_limit_bytes)
            : null,
        )}
        {box(232, "base", "Base image", image, null)}
        {hasRam ? (
          <>
            <Arrow
              x1={near}
              y1={38}
              x2={far}
              y2={38}
              value={value(r?.ram.written)}
              plane="ram"
              text={say(r?.ram.written)}
              at={[middle, 31, "middle"]}
            />
            <Arrow
              x1={far}
              y1={60}
              x2={near}
              y2={60}
              value={value(r?.ram.read)}
              plane="ram"
              text={say(r?.ram.read)}
              at={[middle, 76, "middle"]}
            />
            <Arrow
              x1={down}
              y1={82}
              x2={down}
              y2={122}
              value={toOverflow}
              plane="overflow"
              text={say(r?.overflow.written)}
              at={[down + 9, 107, "start"]}
            />
            <text class="line" x={down - 9} y="107" text-anchor="end">
              evicted
            </text>
          </>
        ) : (
          <Arrow
            x1={near}
            y1={140}
            x2={far}
            y2={140}
            value={toOverflow}
            plane="overflow"
            text={say(r?.overflow.written)}
            at={[middle, 133, "middle"]}
          />
        )}
        <Arrow
          x1={far}
          y1={162}
          x2={near}
          y2={162}
          value={value(r?.overflow.read)}
          plane="overflow"
          text={say(r?.overflow.read)}
          at={[middle, 178, "middle"]}
        />
        <Arrow
          x1={far}
          y1={264}
          x2={near}
          y2={264}
          value={value(r?.base.read)}
          plane="base"
          text={say(r?.base.read)}
          at={[middle, 257, "middle"]}
        />
      </svg>
    </div>
  );
}
