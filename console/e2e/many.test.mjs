// Two thousand machines that all write: the page draws only what can be seen, and a new set of figures costs little.
import assert from "node:assert/strict";
import { test } from "node:test";
import { assertClean, go, launch, open } from "./lib.mjs";

const MACHINES = 2000;
/** The longest that the page may be busy with one set of figures. Generous: hosts that test are slow. */
const MOST_BUSY_MS = 500;

const name = (i) => `many-${String(i + 1).padStart(4, "0")}`;
const machine = (i) => ({
  name: name(i),
  catalog: "many",
  number: i + 1,
  identity: { uuid: "00000000-0000-0000-0000-000000000000", mac: "02:00:00:00:00:00" },
  created: "2026-01-01T00:00:00Z",
  power: "on",
  claim: null,
  drained: false,
  status: {
    phase: "running",
    settled: true,
    since: null,
    ready: true,
    address: null,
    message: null,
    code: null,
    permanent: false,
    run: null,
  },
});
let tick = 0;
const figures = () => {
  tick++;
  const plane = (n) => ({ reads: n, writes: n, read_bytes: n * 4096, written_bytes: n * 4096 });
  return {
    time: new Date(Date.UTC(2026, 0, 1) + tick * 2000).toISOString(),
    since: "2025-12-31T00:00:00Z",
    stores: [],
    catalogs: [],
    machines: Array.from({ length: MACHINES }, (_, i) => ({
      name: name(i),
      catalog: "many",
      phase: "running",
      ready: true,
      claimed: false,
      unresponsive: false,
      spared_bytes: i,
      levels: {
        ram_used_bytes: (i * 977 + tick * 31) % 1000,
        ram_limit_bytes: 1000,
        overflow_limit_bytes: 1000,
      },
      counters: { guest: plane(tick * i), ram: plane(tick * i), overflow: plane(tick), base: plane(1) },
    })),
  };
};

test("two thousand machines", async () => {
  const browser = await launch();
  const { page, seen } = await open(browser);
  await page.route("**/v1/figures*", (route) => route.fulfill({ json: figures() }));
  await page.route("**/v1/machines?*", (route) => {
    const after = Number(new URL(route.request().url()).searchParams.get("continue") ?? 0);
    const items = Array.from({ length: 1000 }, (_, i) => machine(after + i));
    route.fulfill({ json: after + 1000 < MACHINES ? { items, next: String(after + 1000) } : { items } });
  });
  await page.addInitScript(() => {
    globalThis.longest = 0;
    new PerformanceObserver((list) => {
      for (const entry of list.getEntries())
        globalThis.longest = Math.max(globalThis.longest, entry.duration);
    }).observe({ type: "longtask" });
  });
  await go(page, "#/machines?sort=fill");
  await page.getByText(/^2.000 machines$/).waitFor();
  await page.evaluate(() => {
    globalThis.longest = 0;
  });
  const before = tick;
  await page.waitForTimeout(15_000);
  assert.ok(tick > before + 1, "figures go on");
  const busy = await page.evaluate(() => globalThis.longest);
  console.log(`longest task ${Math.round(busy)} ms`);
  assert.ok(busy < MOST_BUSY_MS, `${busy} ms`);
  assert.ok((await page.locator("tbody tr").count()) < 80);
  // The keyboard reaches the last row.
  await page.getByRole("region", { name: "Machines" }).focus();
  await page.keyboard.press("End");
  await page.waitForFunction(() => document.querySelector("tr[aria-rowindex='2001']") !== null);
  assertClean(seen);
  await browser.close();
});
