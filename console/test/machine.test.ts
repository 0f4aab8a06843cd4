import "./dom.ts";
import assert from "node:assert/strict";
import { test } from "node:test";
import type { CatalogSpec, Machine } from "../src/api/client.ts";
import { heldWords } from "../src/pages/machine-off.tsx";
import { spanOf } from "../src/ui/history.tsx";
import { loadPlotLibrary, plotLibrary } from "../src/ui/plot-library.ts";

const status = (phase: string, run: object | null) => ({ phase, run }) as unknown as Machine["status"];
const spec = (more: Partial<CatalogSpec>): CatalogSpec => ({ image: "debian", ...more });

test("a machine that is off says what is kept of it, and never that it is empty", () => {
  const words = (more: Partial<CatalogSpec>, run: object | null = null) =>
    heldWords(status("stopped", run), spec(more)).join(" ");
  assert.match(words({}), /has no disk now\. What it wrote was discarded when it stopped\./);
  for (const kept of [{ type: "dedicated" }, { mode: "persistent" }] as Partial<CatalogSpec>[])
    assert.match(
      words(kept),
      /is kept in a file on the host.*How much that is can be seen while the machine runs\./,
    );
  assert.match(words({ reset: "never" }), /has no data: it has not run since its last reset, or since the host booted/);
  assert.match(words({ reset: "never" }, {}), /keeps what was written until a reset\./);
  assert.match(
    words({ data_disk_bytes: 2 ** 30 }),
    /Its data disk of 1\.0 GiB keeps what was written to it\.$/,
  );
  assert.deepEqual(heldWords(status("stopped", null), undefined), [
    "The machine is off, and has no disk now.",
  ]);
});

test("a machine that runs has figures instead of words", () => {
  assert.deepEqual(heldWords(status("running", {}), spec({})), []);
  assert.deepEqual(heldWords(status("starting", null), spec({})), [
    "The machine starts, and has no disk yet.",
  ]);
  assert.deepEqual(heldWords(status("failed", null), spec({})), [
    "The machine has failed, and has no disk now.",
  ]);
});

test("only a span that is kept is asked for", () => {
  const spans: [number, string][] = [
    [3600, "hour"],
    [900, "15 minutes"],
  ];
  assert.equal(spanOf(undefined, spans), 3600);
  assert.equal(spanOf("900", spans), 900);
  for (const other of ["86400", "-1", "x", ""]) assert.equal(spanOf(other, spans), 3600);
});

test("charts that could not be loaded are loaded again from another address", async () => {
  const asked: string[] = [];
  const fails = (address: string) => {
    asked.push(address);
    return Promise.reject(new Error("no connection"));
  };
  const loading = loadPlotLibrary(fails);
  assert.equal(plotLibrary.value.is, "loading");
  await loadPlotLibrary(fails);
  await loading;
  assert.equal(plotLibrary.value.is, "failed");
  const of = class {} as never;
  await loadPlotLibrary((address) => {
    asked.push(address);
    return Promise.resolve({ default: of });
  });
  assert.deepEqual(plotLibrary.value, { is: "loaded", of });
  await loadPlotLibrary(fails);
  assert.deepEqual(asked, ["http://localhost/chart.js", "http://localhost/chart.js?again=1"]);
});
