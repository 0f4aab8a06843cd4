// Tables: sorted, filtered and selected; long ones draw only the rows that can be seen. The sort is in the URL.
//
// Invariant: a selection only contains rows that are shown. While there is one, rows keep their places, so that none jumps away
// from the pointer.
import type { ComponentChildren } from "preact";
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
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

/** Rows in the order of a column. Equal ones stay in the order that they had. */
export function sorted<T>(rows: T[], column: Column<T> | undefined, isReverse: boolean): T[] {
  const by = column?.sort;
  if (!by) return rows;
  const direction = (column?.isFigure ? -1 : 1) * (isReverse ? -1 : 1);
  return rows
    .map((row) => ({ row, value: by(row) }))
    .sort((a, b) => {
      const x = a.value ?? null;
      const y = b.value ?? null;
      if (x === null || y === null) return x === y ? 0 : x === null ? 1 : -1;
      if (typeof x === "number" && typeof y === "number") return (x - y) * direction;
      return String(x).localeCompare(String(y), "en", { numeric: true }) * direction;
    })
    .map(({ row }) => row);
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

/** What is held while rows are chosen: the places as they were when the first was chosen, or the sort was changed. */
export function hold(was: Held | null, isHeld: boolean, order: string, places: string[]): Held | null {
  if (!isHeld) return null;
  return was?.order === order ? was : { order, places };
}

function classOf(c: { isFigure?: boolean; isWide?: boolean; isExtra?: boolean }): string {
  return `${c.isFigure ? "figure" : ""}${c.isWide ? " wide" : ""}${c.isExtra ? " extra" : ""}`;
}

/** Beyond this many rows, only those that can be seen are drawn. */
const VIRTUAL_FROM = 120;
const ROW_PX = 36;

export interface TableProps<T> {
  label: string;
  rows: T[];
  columns: Column<T>[];
  id(row: T): string;
  /** Sort without one in the URL: a column's key, with "-" before it for the other direction. */
  initial: string;
  selection?: { chosen: Set<string>; change(chosen: Set<string>): void };
  empty: ComponentChildren;
  /** Name of the sort in the URL, if there are several tables on a page. */
  sortName?: string;
}

export function Table<T>(props: TableProps<T>) {
  const { label, columns, id, selection, initial, sortName = "sort" } = props;
  const order = queryValue(sortName) ?? initial;
  const isReverse = order.startsWith("-");
  const by = columns.find((c) => c.key === order.replace(/^-/, ""));
  const held = useRef<Held | null>(null);
  const inOrder = sorted(props.rows, by, isReverse);
  held.current = hold(held.current, (selection?.chosen.size ?? 0) > 0, order, inOrder.map(id));
  const rows = held.current ? inPlace(inOrder, id, held.current.places) : inOrder;
  const isVirtual = rows.length > VIRTUAL_FROM;
  const scroller = useRef<HTMLDivElement>(null);
  const [view, setView] = useState<[number, number]>([0, 60]);
  /** The row that was clicked last: a range begins there. */
  const anchor = useRef<string | null>(null);

  useLayoutEffect(() => {
    const box = scroller.current;
    if (!isVirtual || !box) return;
    const measure = () => {
      const first = Math.max(0, Math.floor(box.scrollTop / ROW_PX) - 10);
      const last = Math.ceil((box.scrollTop + box.clientHeight) / ROW_PX) + 10;
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

  const shownIds = selection ? new Set(rows.map(id)) : null;
  useEffect(() => {
    if (!selection || !shownIds) return;
    const rest = [...selection.chosen].filter((name) => shownIds.has(name));
    if (rest.length !== selection.chosen.size) selection.change(new Set(rest));
  });

  const toggle = (name: string, isOn: boolean, isRange: boolean) => {
    if (!selection) return;
    const next = new Set(selection.chosen);
    for (const one of isRange ? range(rows.map(id), anchor.current, name) : [name]) {
      if (isOn) next.add(one);
      else next.delete(one);
    }
    anchor.current = name;
    selection.change(next);
  };

  const first = isVirtual ? Math.min(view[0], Math.max(0, rows.length - 1)) : 0;
  const last = isVirtual ? Math.min(view[1], rows.length) : rows.length;
  const width = columns.length + (selection ? 1 : 0);
  const isAll = selection !== undefined && rows.length > 0 && selection.chosen.size === rows.length;

  return (
    <div
      class={`table-box${isVirtual ? " virtual" : ""}`}
      ref={scroller}
      {...(isVirtual ? { tabIndex: 0, role: "region", "aria-label": label } : {})}
    >
      <table aria-label={label} aria-rowcount={isVirtual ? rows.length + 1 : undefined}>
        <thead>
          <tr>
            {selection ? (
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
            ) : null}
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
        <tbody>
          {rows.length === 0 ? (
            <tr class="none">
              <td colSpan={width}>{props.empty}</td>
            </tr>
          ) : null}
          {first > 0 ? (
            <tr aria-hidden="true" class="space">
              <td colSpan={width} style={{ height: `${first * ROW_PX}px` }} />
            </tr>
          ) : null}
          {rows.slice(first, last).map((row, i) => {
            const key = id(row);
            const isChosen = selection?.chosen.has(key) ?? false;
            return (
              <tr
                key={key}
                class={isChosen ? "chosen" : undefined}
                aria-rowindex={isVirtual ? first + i + 2 : undefined}
              >
                {selection ? (
                  <td class="pick">
                    <input
                      type="checkbox"
                      aria-label={`Select ${key}`}
                      checked={isChosen}
                      onClick={(e) => toggle(key, e.currentTarget.checked, e.shiftKey)}
                    />
                  </td>
                ) : null}
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
          })}
          {last < rows.length ? (
            <tr aria-hidden="true" class="space">
              <td colSpan={width} style={{ height: `${(rows.length - last) * ROW_PX}px` }} />
            </tr>
          ) : null}
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
