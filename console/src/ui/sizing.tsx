// The sizing curve: what other sizes of the RAM tier would have done with the same requests.
//
// Invariant: both figures of a size are from the same curve, and the page says how old it is and that it is a sample.
import type { ComponentChildren } from "preact";
import { useState } from "preact/hooks";
import type { Curve, Schemas } from "../api/client.ts";
import { absorbed, at, ofCatalog, ofDisk, type Sizing, scale } from "../state/curve.ts";
import { useObject } from "../state/resource.ts";
import { bytes, duration, parseSize, percent, sizeText } from "./format.ts";
import { Empty, useWidth } from "./parts.tsx";

const MIB = 1024 * 1024;
const EVERY_MS = 15_000;

/** A size that a person would choose: whole MiB, and never less than what was asked for. */
export function roundUp(bytes: number): number {
  const step = bytes < MIB ? 65536 : MIB;
  return Math.ceil(bytes / step) * step;
}

/** A curve that is read again now and then, and why that failed the last time. A curve that was read stays. */
interface CurveRead {
  sizing: Sizing | null;
  error: Error | null;
}

/** The curve of a machine's disk; null: none is asked for. */
export function useMachineCurve(machine: string | null): CurveRead {
  const path = machine === null ? null : `/v1/machines/${encodeURIComponent(machine)}/curve?goal=0.95`;
  const { data, error } = useObject<Curve>(path, EVERY_MS);
  return { sizing: data ? ofDisk(data) : null, error };
}

/** The sum of the curves of a catalog's machines; null: none is asked for. */
export function useCatalogCurve(catalog: string | null): CurveRead {
  const path = catalog === null ? null : `/v1/catalogs/${encodeURIComponent(catalog)}/curve`;
  const { data, error } = useObject<Schemas["CatalogCurve"]>(path, EVERY_MS);
  return { sizing: data ? ofCatalog(data) : null, error };
}

const H = 250;
const LEFT = 8;
const TOP = 30;
const BOTTOM = 30;

/** Sizes below an axis: multiples of a power of two, at most so many. */
export function tickSizes(max: number, most: number): number[] {
  const step = 2 ** Math.ceil(Math.log2(max / most));
  return Array.from({ length: Math.floor((max * 0.97) / step) }, (_, i) => (i + 1) * step);
}

function Picture({
  sizing,
  limit,
  ram,
  max,
}: {
  sizing: Sizing;
  limit: number | null;
  ram: number;
  max: number;
}) {
  const [box, W] = useWidth<HTMLDivElement>(720);
  const most = Math.max(1, ...sizing.points.map((p) => Math.max(p.written, p.read)));
  const x = (v: number) => LEFT + (Math.min(v, max) / max) * (W - 2 * LEFT);
  const y = (v: number) => H - BOTTOM - (v / most) * (H - TOP - BOTTOM);
  const shown = sizing.points.filter((p) => p.ram <= max);
  const path = (of: "written" | "read") => {
    const all = [...shown.map((p) => [x(p.ram), y(p[of])]), [x(max), y(at(sizing.points, max)[of])]];
    return `M${all.map(([a, b]) => `${a?.toFixed(1)},${b?.toFixed(1)}`).join("L")}`;
  };
  // Marks that are close to each other get their words in rows.
  const marks = [
    { value: limit, name: "limit now", kind: "now" },
    { value: sizing.goalBytes, name: "95%", kind: "mark" },
    { value: sizing.kneeBytes, name: "more helps little", kind: "mark" },
    { value: sizing.zeroBytes, name: "no overflow", kind: "mark" },
  ]
    .filter((m): m is { value: number; name: string; kind: string } => m.value !== null && m.value <= max)
    .sort((a, b) => a.value - b.value);
  const ends: [number, number] = [0, 0];
  const placed = marks.map((m) => {
    const left = x(m.value);
    const width = m.name.length * 6.6 + 12;
    const start = Math.min(left + 4, W - width);
    const row = start >= ends[0] || ends[0] <= ends[1] ? 0 : 1;
    const text = Math.max(start, ends[row]);
    ends[row] = text + width;
    return { ...m, left, row, text };
  });
  const here = at(sizing.points, ram);
  const ticks = tickSizes(max, W < 480 ? 4 : 8);
  return (
    <div ref={box}>
      <svg
        class="curve"
        viewBox={`0 0 ${W} ${H}`}
        role="img"
        aria-label={`Curve of ${sizing.machines} disks: with ${bytes(ram)} of RAM, ${bytes(here.written)} would have been written to the overflow and ${bytes(here.read)} read from it. Nothing overflows from ${bytes(sizing.zeroBytes)} on.`}
      >
        {[0, 0.5, 1].map((part) => (
          <g key={part}>
            <line class="grid" x1={LEFT} x2={W - LEFT} y1={y(most * part)} y2={y(most * part)} />
            {part > 0 ? (
              <text class="tick" x={W - LEFT} y={y(most * part) + 13} text-anchor="end">
                {bytes(most * part)}
              </text>
            ) : null}
          </g>
        ))}
        {ticks.map((t) => (
          <text key={t} class="tick" x={x(t)} y={H - 10} text-anchor="middle">
            {bytes(t)}
          </text>
        ))}
        <path
          class="area overflow"
          d={`${path("written")}L${x(max)},${y(0)}L${x(shown[0]?.ram ?? 0)},${y(0)}Z`}
        />
        <path class="line overflow" d={path("written")} />
        <path class="line read" d={path("read")} />
        {placed.map((m) => (
          <g key={m.name} class={m.kind}>
            <line x1={m.left} x2={m.left} y1={m.row === 0 ? 12 : 25} y2={H - BOTTOM} />
            <text x={m.text} y={m.row === 0 ? 12 : 25}>
              {m.name}
            </text>
          </g>
        ))}
        <g class="chosen">
          <line x1={x(ram)} x2={x(ram)} y1={TOP} y2={H - BOTTOM} />
          <circle cx={x(ram)} cy={y(here.written)} r="4.5" />
        </g>
      </svg>
    </div>
  );
}

export interface SizingProps {
  sizing: Sizing;
  /** Limit of each machine today; null if it is not known. */
  limit: number | null;
  /** How many machines would get a new limit. */
  machines: number;
  /** What stands below the slider: what the host would say, and what applies it. */
  children?(ram: number): ComponentChildren;
}

export function SizingPanel({ sizing, limit, machines, children }: SizingProps) {
  const { step, max } = scale(sizing, limit ?? 0);
  const [chosen, setChosen] = useState<number | null>(null);
  const [text, setText] = useState<string | null>(null);
  const ram = chosen ?? limit ?? sizing.goalBytes;
  const here = at(sizing.points, ram);
  const today = limit === null ? null : at(sizing.points, limit);
  const share = absorbed(sizing, ram);
  if (sizing.writtenBytes === 0) {
    return (
      <Empty>The guests have written nothing since their disks were started, so every size would do.</Empty>
    );
  }
  const wrong = text === null ? null : parseSize(text);
  return (
    <div class="sizing">
      <ul class="legend">
        <li>
          <span class="swatch overflow" aria-hidden="true" />
          written to the overflow
        </li>
        <li>
          <span class="swatch read-line" aria-hidden="true" />
          read from the overflow
        </li>
        <li class="muted">by RAM tier of each machine</li>
      </ul>
      <Picture sizing={sizing} limit={limit} ram={ram} max={max} />
      <div class="slider">
        <label>
          <span class="sr-only">RAM tier of each machine</span>
          <input
            type="range"
            min={step}
            max={max}
            step={step}
            value={ram}
            aria-valuetext={bytes(ram)}
            onInput={(e) => {
              setChosen(Number(e.currentTarget.value));
              setText(null);
            }}
          />
        </label>
      </div>
      <div class="sizing-row">
        <label class="field">
          <span>RAM tier for each</span>
          <input
            type="text"
            inputMode="text"
            size={8}
            value={text ?? sizeText(ram)}
            aria-invalid={wrong !== null && typeof wrong !== "number"}
            onInput={(e) => {
              setText(e.currentTarget.value);
              const n = parseSize(e.currentTarget.value);
              if (typeof n === "number" && n >= 65536) setChosen(n);
            }}
            onBlur={() => setText(null)}
          />
        </label>
        <dl class="facts">
          <div>
            <dt>Written to the overflow</dt>
            <dd>
              <strong>{bytes(here.written)}</strong>
              {today && ram !== limit ? <span class="muted"> now {bytes(today.written)}</span> : null}
            </dd>
          </div>
          <div>
            <dt>Read from the overflow</dt>
            <dd>
              <strong>{bytes(here.read)}</strong>
              {today && ram !== limit ? <span class="muted"> now {bytes(today.read)}</span> : null}
            </dd>
          </div>
          <div>
            <dt>RAM absorbs</dt>
            <dd>
              <strong>{share === null ? "-" : percent(share)}</strong>{" "}
              <span class="muted">of {bytes(sizing.writtenBytes)} written</span>
            </dd>
          </div>
          <div>
            <dt>For {machines === 1 ? "the machine" : `${machines} machines`}</dt>
            <dd>
              <strong>{bytes(ram * machines)}</strong>
            </dd>
          </div>
        </dl>
      </div>
      <div class="picks">
        {(
          [
            ["Limit now", limit],
            ["95% absorbed", roundUp(sizing.goalBytes)],
            ["More helps little above", sizing.kneeBytes === null ? null : roundUp(sizing.kneeBytes)],
            ["No overflow", roundUp(sizing.zeroBytes)],
          ] as [string, number | null][]
        ).map(([name, value]) =>
          value === null ? null : (
            <button type="button" key={name} aria-pressed={value === ram} onClick={() => setChosen(value)}>
              {name} <strong>{bytes(value)}</strong>
            </button>
          ),
        )}
      </div>
      {children?.(ram)}
      <p class="hint">
        Counted for {duration(sizing.seconds)} on{" "}
        {sizing.machines === 1 ? "one disk" : `${sizing.machines} disks`}
        {sizing.sampledOneIn > 1.01 ? `, one block in ${Math.round(sizing.sampledOneIn)}` : ""}: an estimate
        of what a cache that evicts the least recently used block would have done with the same requests. Best
        after a day of normal work.
      </p>
    </div>
  );
}
