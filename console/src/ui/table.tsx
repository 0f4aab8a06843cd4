// Tables: sorted, filtered and selected; long ones draw only the rows that can be seen. The sort is in the URL.
//
// Invariant: a selection only contains rows that are shown. While there is one, or a row has the focus, rows keep their places,
// so that none jumps away from the pointer or the keyboard. A row that has the focus is drawn wherever it is.
import { signal } from "@preact/signals";
import type { ComponentChildren, RefObject, VNode } from "preact";
import { useCallback, useEffect, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import { queryValue, setQuery } from "../router.ts";
import { plural } from "./format.ts";

export interface Column<T> {
  key: string;
  title: string;
  cell(row: T): ComponentChildren;
  /** What rows are sorted by; undefined sorts last in either direction. */
  sort?(row: T): number | string | null | undefined;
  /** Figures are aligned right, and largest first when they are sorted by. */
  isFigure?: boolean;
  /** Left out where there is little width. */
  isWide?: boolean;
  /** Left out unless there is much width. */
  isExtra?: boolean;
  hint?: string;
}

type SortKey = number | string | null | undefined;
/** Made once: to compare two texts without it costs more than all else of a sort. */
const COLLATOR = new Intl.Collator("en", { numeric: true });

/**
 * The order of keys, as their indexes: those that are not known last in either direction, equal ones as they were.
 * `direction`: 1 for the smallest first, -1 for the largest.
 */
export function orderOf(keys: readonly SortKey[], direction: 1 | -1): number[] {
  const known: number[] = [];
  const unknown: number[] = [];
  for (const [i, key] of keys.entries()) (key == null ? unknown : known).push(i);
  known.sort((a, b) => {
    const x = keys[a] as number | string;
    const y = keys[b] as number | string;
    const difference =
      typeof x === "number" && typeof y === "number" ? x - y : COLLATOR.compare(String(x), String(y));
    return difference * direction || a - b;
  });
  return known.concat(unknown);
}

interface Order {
  keys: SortKey[];
  direction: 1 | -1;
  indexes: number[];
}

/** The order of these keys: that of before if they are the same. */
export function reorder(was: Order | null, keys: SortKey[], direction: 1 | -1): Order {
  const isSame =
    was?.direction === direction &&
    was.keys.length === keys.length &&
    keys.every((key, i) => key === was.keys[i]);
  return isSame ? was : { keys, direction, indexes: orderOf(keys, direction) };
}

/** Rows in the order of a column. */
function useSorted<T>(rows: T[], column: Column<T> | undefined, isReverse: boolean): T[] {
  const order = useRef<Order | null>(null);
  if (!column?.sort) return rows;
  const key = column.sort;
  const direction = (column.isFigure ?? false) === isReverse ? 1 : -1;
  const keys = rows.map((row) => key(row));
  order.current = reorder(order.current, keys, direction);
  return order.current.indexes.map((i) => rows[i] as T);
}

/** Rows in the places that they had. Those that had none follow, in the order that they come in. */
export function inPlace<T>(rows: T[], id: (row: T) => string, places: string[]): T[] {
  const at = new Map(places.map((name, place) => [name, place]));
  const place = (row: T) => at.get(id(row)) ?? places.length;
  return [...rows].sort((a, b) => place(a) - place(b));
}

/** The rows from one to another, in either direction. Without the first, which may not be shown any more, only the second. */
export function range(shown: string[], from: string | null, to: string): string[] {
  const start = from === null ? -1 : shown.indexOf(from);
  const end = shown.indexOf(to);
  if (start < 0) return [to];
  return shown.slice(Math.min(start, end), Math.max(start, end) + 1);
}

/** The places of rows at the last change of the sort. */
export interface Held {
  order: string;
  places: string[];
}

/** What is held: the places as they were when the first row was chosen or got the focus, or when the sort was changed. */
export function hold(was: Held | null, order: string, places: string[]): Held {
  return was?.order === order ? was : { order, places };
}

function classOf(c: { isFigure?: boolean; isWide?: boolean }): string {
  return `${c.isFigure ? "figure" : ""}${c.isWide ? " wide" : ""}`;
}

const tight = matchMedia("(max-width: 1450px)");
const isTight = signal(tight.matches);
tight.addEventListener("change", () => {
  isTight.value = tight.matches;
});

/** The columns that there is width for. Others are not drawn at all: each set of figures would change them, too. */
function useFitting<T>(columns: Column<T>[]): Column<T>[] {
  const isAll = !isTight.value;
  return useMemo(() => (isAll ? columns : columns.filter((c) => !c.isExtra)), [columns, isAll]);
}

/** Beyond this many rows, only those that can be seen are drawn. */
const VIRTUAL_FROM = 120;
const ROW_PX = 36;
/** Rows that are drawn above and below those that can be seen. */
const MARGIN_ROWS = 5;

/** A part of a table's body: a row, by its place, or the space of so many rows that are not drawn. */
export type Part = { place: number } | { space: number };

/** The body of a table that draws the rows from one place to before another, and `kept`, which has the focus. */
export function partsOf(count: number, first: number, last: number, kept: number | null): Part[] {
  const from = Math.max(0, Math.min(first, count - 1));
  const to = Math.min(last, count);
  const places = Array.from({ length: Math.max(0, to - from) }, (_, i) => from + i);
  if (kept !== null && kept < from) places.unshift(kept);
  if (kept !== null && kept >= to) places.push(kept);
  const parts: Part[] = [];
  let next = 0;
  for (const place of places) {
    if (place > next) parts.push({ space: place - next });
    parts.push({ place });
    next = place + 1;
  }
  if (count > next) parts.push({ space: count - next });
  return parts;
}

/** The places of the rows that a scrolled box shows: the first, and the one behind the last. */
function useWindow(scroller: RefObject<HTMLElement | null>, isVirtual: boolean): [number, number] {
  const [view, setView] = useState<[number, number]>([0, 60]);
  useLayoutEffect(() => {
    const box = scroller.current;
    if (!isVirtual || !box) return;
    const measure = () => {
      const first = Math.max(0, Math.floor(box.scrollTop / ROW_PX) - MARGIN_ROWS);
      const last = Math.ceil((box.scrollTop + box.clientHeight) / ROW_PX) + MARGIN_ROWS;
      setView((was) => (was[0] === first && was[1] === last ? was : [first, last]));
    };
    measure();
    box.addEventListener("scroll", measure, { passive: true });
    const observer = new ResizeObserver(measure);
    observer.observe(box);
    return () => {
      box.removeEventListener("scroll", measure);
      observer.disconnect();
    };
  }, [isVirtual]);
  return view;
}

/** The row that has the focus, by its name, and how to say that another one has it, or none. */
function useFocusedRow(isThere: (name: string) => boolean) {
  const [focused, setFocused] = useState<string | null>(null);
  useLayoutEffect(() => {
    if (focused === null || isThere(focused)) return;
    setFocused(null);
    if (document.activeElement === document.body) document.getElementById("page-title")?.focus();
  });
  return [focused, setFocused] as const;
}

interface RowProps<T> {
  row: T;
  name: string;
  columns: Column<T>[];
  /** From 1; undefined: the table draws all rows. */
  rowIndex: number | undefined;
  /** null: rows are not selected here. */
  isChosen: boolean | null;
  toggle(name: string, isOn: boolean, isRange: boolean): void;
  focus(name: string): void;
}

function Row<T>({ row, name, columns, rowIndex, isChosen, toggle, focus }: RowProps<T>) {
  return (
    <tr class={isChosen ? "chosen" : undefined} aria-rowindex={rowIndex} onFocusIn={() => focus(name)}>
      {isChosen === null ? null : (
        <td class="pick">
          <input
            type="checkbox"
            aria-label={`Select ${name}`}
            checked={isChosen}
            onClick={(e) => toggle(name, e.currentTarget.checked, e.shiftKey)}
          />
        </td>
      )}
      {columns.map((c, at) =>
        at === 0 ? (
          <th key={c.key} scope="row">
            {c.cell(row)}
          </th>
        ) : (
          <td key={c.key} class={classOf(c)}>
            {c.cell(row)}
          </td>
        ),
      )}
    </tr>
  );
}

/** The space of rows that are not drawn. */
function Space({ rows, width }: { rows: number; width: number }) {
  return (
    <tr aria-hidden="true" class="space">
      <td colSpan={width} style={{ height: `${rows * ROW_PX}px` }} />
    </tr>
  );
}

/** Draws the parts of a body: rows that are as they were last time are not looked at again. */
function useRows<T>() {
  const drawn = useRef(new Map<string, { props: RowProps<T>; node: VNode }>());
  return (parts: (RowProps<T> | { space: number })[], width: number): VNode[] => {
    const before = drawn.current;
    drawn.current = new Map();
    return parts.map((part) => {
      if ("space" in part) return <Space rows={part.space} width={width} />;
      const was = before.get(part.name);
      const keys = Object.keys(part) as (keyof RowProps<T>)[];
      const isSame = was !== undefined && keys.every((key) => was.props[key] === part[key]);
      const now = isSame ? was : { props: part, node: <Row key={part.name} {...part} /> };
      drawn.current.set(part.name, now);
      return now.node;
    });
  };
}

export interface TableProps<T> {
  label: string;
  rows: T[];
  /** A cell that shows what is not of its row reads it from a signal: a row that is the same is not drawn again. */
  columns: Column<T>[];
  id(row: T): string;
  /** Sort without one in the URL: a column's key, with "-" before it for the other direction. */
  initial: string;
  selection?: { chosen: Set<string>; change(chosen: Set<string>): void };
  empty: ComponentChildren;
  /** Name of the sort in the URL, if there are several tables on a page. */
  sortName?: string;
}

interface HeadProps<T> extends Pick<TableProps<T>, "columns" | "initial"> {
  by: Column<T> | undefined;
  isReverse: boolean;
  sortName: string;
  /** The cell that selects all rows. */
  pick: ComponentChildren;
}

function Head<T>({ columns, by, isReverse, initial, sortName, pick }: HeadProps<T>) {
  return (
    <thead>
      <tr>
        {pick}
        {columns.map((c) => {
          const isBy = c.key === by?.key;
          const isDown = isBy && isReverse === !c.isFigure;
          return (
            <th
              key={c.key}
              scope="col"
              class={classOf(c)}
              aria-sort={isBy ? (isDown ? "descending" : "ascending") : undefined}
              title={c.hint}
            >
              {c.sort ? (
                <button
                  type="button"
                  class="sort"
                  onClick={() => {
                    const next = isBy && !isReverse ? `-${c.key}` : c.key;
                    setQuery({ [sortName]: next === initial ? undefined : next });
                  }}
                >
                  {c.title}
                  {isBy ? (
                    <span aria-hidden="true" class="sort-mark">
                      {isDown ? "\u2193" : "\u2191"}
                    </span>
                  ) : null}
                </button>
              ) : (
                c.title
              )}
            </th>
          );
        })}
      </tr>
    </thead>
  );
}

export function Table<T>(props: TableProps<T>) {
  const { label, id, selection, initial, sortName = "sort" } = props;
  const columns = useFitting(props.columns);
  const order = queryValue(sortName) ?? initial;
  const isReverse = order.startsWith("-");
  const by = props.columns.find((c) => c.key === order.replace(/^-/, ""));
  const inOrder = useSorted(props.rows, by, isReverse);
  const [focused, setFocused] = useFocusedRow((name) => props.rows.some((row) => id(row) === name));
  const isHeld = focused !== null || (selection?.chosen.size ?? 0) > 0;
  const held = useRef<Held | null>(null);
  held.current = isHeld ? hold(held.current, order, inOrder.map(id)) : null;
  const rows = held.current ? inPlace(inOrder, id, held.current.places) : inOrder;
  const isVirtual = rows.length > VIRTUAL_FROM;
  const scroller = useRef<HTMLDivElement>(null);
  const [first, last] = useWindow(scroller, isVirtual);
  /** The row that was clicked last: a range begins there. */
  const anchor = useRef<string | null>(null);
  const draw = useRows<T>();

  useEffect(() => {
    if (!selection || selection.chosen.size === 0) return;
    const shown = new Set(rows.map(id));
    const rest = [...selection.chosen].filter((name) => shown.has(name));
    if (rest.length !== selection.chosen.size) selection.change(new Set(rest));
  });

  const select = useRef<RowProps<T>["toggle"]>(() => {});
  select.current = (name, isOn, isRange) => {
    if (!selection) return;
    const next = new Set(selection.chosen);
    for (const one of isRange ? range(rows.map(id), anchor.current, name) : [name]) {
      if (isOn) next.add(one);
      else next.delete(one);
    }
    anchor.current = name;
    selection.change(next);
  };
  // The same function for all of the table's life, so that rows stay the same.
  const toggle = useCallback<RowProps<T>["toggle"]>((...click) => select.current(...click), []);

  const kept = focused === null ? -1 : rows.findIndex((row) => id(row) === focused);
  const parts = isVirtual
    ? partsOf(rows.length, first, last, kept < 0 ? null : kept)
    : partsOf(rows.length, 0, rows.length, null);
  const rowAt = (place: number): RowProps<T> => {
    const row = rows[place] as T;
    const name = id(row);
    return {
      row,
      name,
      columns,
      rowIndex: isVirtual ? place + 2 : undefined,
      isChosen: selection ? selection.chosen.has(name) : null,
      toggle,
      focus: setFocused,
    };
  };
  const width = columns.length + (selection ? 1 : 0);
  const isAll = selection !== undefined && rows.length > 0 && selection.chosen.size === rows.length;
  return (
    <div
      class={`table-box${isVirtual ? " virtual" : ""}`}
      ref={scroller}
      {...(isVirtual ? { tabIndex: 0, role: "region", "aria-label": label } : {})}
    >
      <table aria-label={label} aria-rowcount={isVirtual ? rows.length + 1 : undefined}>
        <Head
          {...{ columns, by, isReverse, initial, sortName }}
          pick={
            selection ? (
              <th scope="col" class="pick">
                <input
                  type="checkbox"
                  aria-label="Select all rows"
                  checked={isAll}
                  ref={(box) => {
                    if (box) box.indeterminate = selection.chosen.size > 0 && !isAll;
                  }}
                  onChange={(e) => selection.change(new Set(e.currentTarget.checked ? rows.map(id) : []))}
                />
              </th>
            ) : null
          }
        />
        <tbody
          onFocusOut={({ currentTarget: body, relatedTarget }) => {
            // A window that loses the focus gives it back to where it was.
            const isIn = (place: EventTarget | null) => body.contains(place as Node | null);
            if (!isIn(relatedTarget) && !isIn(document.activeElement)) setFocused(null);
          }}
        >
          {rows.length === 0 ? (
            <tr class="none">
              <td colSpan={width}>{props.empty}</td>
            </tr>
          ) : null}
          {draw(parts.map((part) => ("space" in part ? part : rowAt(part.place))), width)}
        </tbody>
      </table>
    </div>
  );
}

/** What is selected, and what can be done with it. */
export function SelectionBar({
  chosen,
  clear,
  noun,
  children,
}: {
  chosen: Set<string>;
  clear(): void;
  noun: string;
  children: ComponentChildren;
}) {
  if (chosen.size === 0) return null;
  return (
    <div class="selection" role="region" aria-label="Selection">
      <strong>{plural(chosen.size, noun)} selected</strong>
      <span class="hint">Rows keep their places meanwhile.</span>
      <div class="acts">{children}</div>
      <button type="button" class="plain" onClick={clear}>
        Clear
      </button>
    </div>
  );
}
