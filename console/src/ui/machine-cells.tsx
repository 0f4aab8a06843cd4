// Cells that tables of machines and catalogs have in common.

import type { Schemas } from "../api/client.ts";
import type { CatalogRow, Row } from "../state/moments.ts";
import { total } from "../state/moments.ts";
import { bytes, percent, rate, timeToFull } from "./format.ts";
import { Badge, type Tone } from "./parts.tsx";
import { levelOf, Spark, TierBars } from "./planes.tsx";
import type { Column } from "./table.tsx";

const LEVEL_TONE = { normal: "plain", warning: "warning", critical: "critical", full: "critical" } as const;

/** The level of a write cache as a word. Normal needs none. */
export function LevelBadge({ row }: { row: Row }) {
  const level = levelOf(row.levels);
  if (row.levels.degraded) return <Badge tone="critical">degraded</Badge>;
  if (row.levels.stalled) return <Badge tone="critical">stalled</Badge>;
  return level === "normal" ? null : <Badge tone={LEVEL_TONE[level]}>{level}</Badge>;
}

const PHASE_TONE: Record<Schemas["Phase"], Tone> = {
  stopped: "plain",
  waiting: "warning",
  placing: "note",
  starting: "note",
  running: "note",
  stopping: "plain",
  failed: "critical",
};

export function PhaseBadge({ phase, isReady }: { phase: Schemas["Phase"]; isReady: boolean }) {
  if (isReady) return <Badge tone="good">ready</Badge>;
  return <Badge tone={PHASE_TONE[phase]}>{phase}</Badge>;
}

/** A rate. Nothing is less important than something. */
function Rate({ value }: { value: number | null | undefined }) {
  return <span class={value ? "number" : "number muted"}>{rate(value)}</span>;
}

const NONE = <span class="muted">-</span>;

/** Columns of the figures of a disk. */
export function figureColumns<T>(of: (row: T) => Row | undefined): Column<T>[] {
  const withRow = (show: (row: Row) => unknown) => (item: T) => {
    const row = of(item);
    return row ? (show(row) as never) : NONE;
  };
  return [
    {
      key: "fill",
      title: "Fill",
      isFigure: true,
      hint: "Share of RAM tier and overflow together that is used",
      sort: (item) => of(item)?.fill,
      cell: withRow((row) => (
        <span class="fill-cell">
          <LevelBadge row={row} />
          <TierBars levels={row.levels} />
          <span class="number">{percent(row.fill)}</span>
        </span>
      )),
    },
    {
      key: "full",
      title: "Full in",
      isFigure: true,
      hint: "If it goes on growing as in the last 30 seconds",
      // The soonest comes first.
      sort: (item) => {
        const seconds = of(item)?.secondsToFull;
        return seconds == null ? null : -seconds;
      },
      cell: withRow((row) => (row.secondsToFull === null ? NONE : timeToFull(row.secondsToFull))),
    },
    {
      key: "written",
      title: "Written/s",
      isFigure: true,
      hint: "Bytes that guests write in a second. The picture: what was written to RAM tier and overflow in the last ten minutes",
      sort: (item) => of(item)?.rates?.guest.written ?? null,
      cell: withRow((row) => (
        <span class="spark-cell">
          <Spark samples={row.samples} label="Written to RAM tier and overflow" />
          <Rate value={row.rates?.guest.written} />
        </span>
      )),
    },
    {
      key: "read",
      title: "Read/s",
      isFigure: true,
      isExtra: true,
      hint: "Bytes that guests read in a second",
      sort: (item) => of(item)?.rates?.guest.read ?? null,
      cell: withRow((row) => <Rate value={row.rates?.guest.read} />),
    },
    {
      key: "overflow",
      title: "Overflow/s",
      isFigure: true,
      isExtra: true,
      hint: "Bytes read and written in the overflow in a second",
      sort: (item) => {
        const r = of(item)?.rates;
        return r ? r.overflow.read + r.overflow.written : null;
      },
      cell: withRow((row) => (
        <Rate value={row.rates ? row.rates.overflow.read + row.rates.overflow.written : null} />
      )),
    },
    {
      key: "spared",
      title: "Spared",
      isFigure: true,
      isExtra: true,
      hint: "Bytes that guests wrote and that never reached a disk",
      sort: (item) => of(item)?.sparedBytes,
      cell: withRow((row) => bytes(row.sparedBytes)),
    },
  ];
}

/** Machines of a catalog by phase, in words. */
export function Counts({ row }: { row: CatalogRow }) {
  const { counts } = row;
  return (
    <span class="counts">
      <span>
        {counts.running}/{total(counts)}
      </span>
      {counts.failed ? <Badge tone="critical">{counts.failed} failed</Badge> : null}
      {counts.waiting ? <Badge tone="warning">{counts.waiting} waiting</Badge> : null}
      {counts.claimed ? <Badge>{counts.claimed} claimed</Badge> : null}
    </span>
  );
}
