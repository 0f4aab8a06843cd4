// Cells that tables of machines and catalogs have in common.
//
// Invariant: a new set of figures changes texts and bars of cells that are drawn, and draws none anew: with hundreds of machines that
// write, all that is on the screen changes every two seconds.
import { effect, untracked } from "@preact/signals";
import type { VNode } from "preact";
import { useLayoutEffect, useRef, useState } from "preact/hooks";
import type { Schemas } from "../api/client.ts";
import type { CatalogRow, Row, Sample } from "../state/moments.ts";
import { total } from "../state/moments.ts";
import { bytes, percent, rate, timeToFull } from "./format.ts";
import { Badge, type Tone } from "./parts.tsx";
import { drawTiers, levelOf, Spark, TierBars } from "./planes.tsx";
import type { Column } from "./table.tsx";

const LEVEL_TONE = {
  warning: "warning",
  critical: "critical",
  full: "critical",
  degraded: "critical",
  stalled: "critical",
} as const;

/** The level of a write cache as a word. Normal needs none. */
function levelOfRow({ levels }: Row): keyof typeof LEVEL_TONE | null {
  if (levels.degraded) return "degraded";
  if (levels.stalled) return "stalled";
  const level = levelOf(levels);
  return level === "normal" ? null : level;
}

export function LevelBadge({ row }: { row: Row }) {
  const level = levelOfRow(row);
  return level ? <Badge tone={LEVEL_TONE[level]}>{level}</Badge> : null;
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

/** A row of figures of an item. `of` may read it from a signal. */
interface Source<T, R extends Row = Row> {
  item: T;
  of(item: T): R | undefined;
}

/** What is derived from figures: its component is drawn anew when it is another value, not with each set of figures. */
export function useDerived<T, V, R extends Row>({ item, of }: Source<T, R>, derive: (row: R | undefined) => V): V {
  const [value, setValue] = useState(() => untracked(() => derive(of(item))));
  // Runs again with each set of figures
  useLayoutEffect(
    () =>
      effect(() => {
        const now = derive(of(item));
        setValue(() => now);
      }),
    [item],
  );
  return value;
}

function Level<T>(source: Source<T>) {
  const badge = useDerived(source, (row) => (row ? levelOfRow(row) : null));
  return badge ? <Badge tone={LEVEL_TONE[badge]}>{badge}</Badge> : null;
}

const NO_SAMPLES: Sample[] = [];

function Written<T>(source: Source<T>) {
  const samples = useDerived(source, (row) => row?.samples ?? NO_SAMPLES);
  return <Spark samples={samples} label="Written to RAM tier and overflow" />;
}

const NONE = <span class="muted">-</span>;
const NUMBER = <span class="number">-</span>;

interface FiguresProps<T> extends Source<T> {
  /** What is there whatever the figures are. */
  frame: VNode;
  /** It has a picture, too. */
  isPictured?: boolean;
  /** Writes figures into the frame. */
  fill(row: Row, frame: Element): void;
}

/** Figures of a cell. */
function Figures<T>({ item, of, frame, isPictured, fill }: FiguresProps<T>) {
  const isKnown = useDerived({ item, of }, (row) => row !== undefined);
  const box = useRef<HTMLSpanElement>(null);
  // Before the browser paints: nobody sees a frame without figures
  useLayoutEffect(
    () =>
      effect(() => {
        const row = of(item);
        const drawn = box.current?.firstElementChild;
        if (row && drawn) fill(row, drawn);
      }),
    [item, isKnown],
  );
  if (!isKnown) return NONE;
  return (
    <span class={isPictured ? "figures pictured" : "figures"} ref={box}>
      {frame}
    </span>
  );
}

/** Changes a text that is drawn, if it is another one. */
function write(text: string, element: Element | null): void {
  const node = element?.firstChild;
  if (node instanceof Text && node.data !== text) node.data = text;
}

/** Writes a rate. Nothing is less important than something. */
function writeRate(value: number | null | undefined, element: Element | null): void {
  write(rate(value), element);
  element?.classList.toggle("muted", !value);
}

const overflowRate = ({ rates }: Row) => (rates ? rates.overflow.read + rates.overflow.written : null);

/** Columns of the figures of a disk. */
export function figureColumns<T>(of: Source<T>["of"]): Column<T>[] {
  const figure = (fill: FiguresProps<T>["fill"]) => (item: T) => (
    <Figures item={item} of={of} frame={NUMBER} fill={fill} />
  );
  return [
    {
      key: "fill",
      title: "Fill",
      isFigure: true,
      hint: "Share of RAM tier and overflow together that is used",
      sort: (item) => of(item)?.fill,
      cell: (item) => (
        <Figures
          item={item}
          of={of}
          isPictured
          frame={
            <span class="fill-cell">
              <Level item={item} of={of} />
              <TierBars />
              {NUMBER}
            </span>
          }
          fill={(row, frame) => {
            const number = frame.lastElementChild;
            write(percent(row.fill), number);
            drawTiers(row.levels, number?.previousElementSibling);
          }}
        />
      ),
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
      cell: figure((row, element) => {
        write(timeToFull(row.secondsToFull), element);
        element.classList.toggle("muted", row.secondsToFull === null);
      }),
    },
    {
      key: "written",
      title: "Written/s",
      isFigure: true,
      hint: "Bytes that guests write in a second. The picture: what was written to RAM tier and overflow in the last ten minutes",
      sort: (item) => of(item)?.rates?.guest.written ?? null,
      cell: (item) => (
        <Figures
          item={item}
          of={of}
          isPictured
          frame={
            <span class="spark-cell">
              <Written item={item} of={of} />
              {NUMBER}
            </span>
          }
          fill={(row, frame) => writeRate(row.rates?.guest.written, frame.lastElementChild)}
        />
      ),
    },
    {
      key: "read",
      title: "Read/s",
      isFigure: true,
      isExtra: true,
      hint: "Bytes that guests read in a second",
      sort: (item) => of(item)?.rates?.guest.read ?? null,
      cell: figure((row, element) => writeRate(row.rates?.guest.read, element)),
    },
    {
      key: "overflow",
      title: "Overflow/s",
      isFigure: true,
      isExtra: true,
      hint: "Bytes read and written in the overflow in a second",
      sort: (item) => {
        const row = of(item);
        return row && overflowRate(row);
      },
      cell: figure((row, element) => writeRate(overflowRate(row), element)),
    },
    {
      key: "spared",
      title: "Spared",
      isFigure: true,
      isExtra: true,
      hint: "Bytes that guests wrote and that never reached a disk",
      sort: (item) => of(item)?.sparedBytes,
      cell: figure((row, element) => write(bytes(row.sparedBytes), element)),
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
