// The columns of the list of machines, and the figures that it asks for: a column shows the same with these as with all of them.
import "./dom.ts";
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";
import type { Counters, Figures, Levels } from "../src/api/client.ts";
import { LISTED } from "../src/state/figures.ts";
import { type MachineRow, Moments } from "../src/state/moments.ts";
import { figureColumns, LevelBadge } from "../src/ui/machine-cells.tsx";
import { Spark } from "../src/ui/planes.tsx";

type Numbers = { [name: string]: number | Numbers };
const api = JSON.parse(readFileSync(new URL("../../docs/api/openapi.json", import.meta.url), "utf8"));

/** All figures of a schema of the API. Each is another number. */
let last = 0;
function every(schema: string): Numbers {
  const properties: [string, { type?: string }][] = Object.entries(api.components.schemas[schema].properties);
  return Object.fromEntries(
    properties.map(([name, { type }]) => [name, type === "integer" ? ++last : every("PlaneCounters")]),
  );
}

/** The figures later: each is so many times what it is at first, and there is room left. */
function grown(numbers: Numbers, times: number): Numbers {
  return Object.fromEntries(
    Object.entries(numbers).map(([name, one]) => [
      name,
      typeof one === "number" ? one * (name.includes("limit") ? 100_000 : times) : grown(one, times),
    ]),
  );
}

/** Of these figures, those that a list asks for. */
function listed(numbers: Numbers, under: string): Numbers {
  const asked = LISTED.split(",");
  const entries = Object.entries(numbers).map(([name, one]) => {
    const path = `${under}.${name}`;
    return [name, asked.includes(path) ? one : typeof one === "number" ? undefined : listed(one, path)];
  });
  return Object.fromEntries(entries.filter(([, one]) => one !== undefined));
}

/** A machine with these figures, which grow in four seconds. */
function row(levels: Numbers, counters: Numbers, choose: typeof listed): MachineRow {
  const moments = new Moments();
  for (const [second, times] of [
    [0, 1000],
    [2, 3000],
    [4, 4000],
  ] as const) {
    const machine = {
      name: "a",
      catalog: "desk",
      phase: "running",
      ready: true,
      claimed: false,
      unresponsive: false,
      levels: choose(grown(levels, times), "levels") as Levels,
      counters: choose(grown(counters, times), "counters") as Counters,
      spared_bytes: 7,
    } as const;
    const time = `2026-01-01T00:00:0${second}Z`;
    moments.add({ time, since: "2025-12-31T00:00:00Z", stores: [], catalogs: [], machines: [machine] } as Figures);
  }
  return moments.machines()[0] as MachineRow;
}

/** What is drawn, without what Preact notes beside it. */
const drawn = (node: unknown) => JSON.stringify(node, (key, value) => (key.startsWith("__") ? undefined : value));

test("a list of machines asks for all figures that its columns show", () => {
  const numbers = [every("DiskLevels"), every("DiskCounters")] as const;
  const all = row(...numbers, (figures) => figures);
  const some = row(...numbers, listed);
  for (const { key, sort } of figureColumns<MachineRow>((item) => item)) {
    const shown = sort?.(all);
    assert.ok(shown, `${key}: it is sorted by what it shows`);
    assert.equal(sort?.(some), shown, key);
  }
  const picture = (of: MachineRow) => drawn(Spark({ samples: of.samples, label: "Written" }));
  assert.match(picture(all), /peak/);
  assert.equal(picture(some), picture(all));
  const none = { degraded: 0, stalled: 0, full: 0, critical: 0, warning: 0 };
  for (const level of Object.keys(none) as (keyof typeof none)[]) {
    const badge = ({ levels }: MachineRow) =>
      drawn(LevelBadge({ row: { levels: { ...none, [level]: levels[level] } } as MachineRow }));
    assert.match(badge(all), new RegExp(level));
    assert.equal(badge(some), badge(all), level);
  }
});
