// Acts on many machines: in requests that the daemon takes, with what is lost, and with what has become of each part.
import "./dom.ts";
import assert from "node:assert/strict";
import { beforeEach, test } from "node:test";
import { catalogsAct, deleteMachine, keeping, keepsData, machineAct, machinesTarget } from "../src/acts.ts";
import { type Catalog, keysByContent, type Machine, type Schemas } from "../src/api/client.ts";
import { type Request, transport } from "../src/transport.ts";
import { headingOf } from "../src/ui/dialog.tsx";

const names = Array.from({ length: 2500 }, (_, i) => `m-${String(i + 1).padStart(4, "0")}`);
const catalog = (name: string, spec: Partial<Schemas["CatalogSpec"]> = {}) =>
  ({ name, spec: { image: "a", grace_seconds: 9, ...spec } }) as unknown as Catalog;
const POOLED = catalog("pooled");
const KEPT = catalog("kept", { type: "dedicated" });
const row = (name: string, of: string) => ({ name, catalog: of, claimed: name === "b" });

let sent: Request[] = [];
/** The number of the request that is refused, or that does not come back. */
let refused: number | null = null;
let lost: number | null = null;
beforeEach(() => {
  sent = [];
  refused = null;
  lost = null;
  transport.request = async (request) => {
    sent.push(request);
    if (sent.length === lost) throw new TypeError("no network");
    const isRefused = sent.length === refused;
    const detail = "there is no machine 'm-1500'";
    return { status: isRefused ? 404 : 200, etag: null, body: isRefused ? { detail } : { items: [] } };
  };
});
const bodies = () => sent.map((r) => r.body as { select: Schemas["Selector"]; discard_data?: boolean });
const keys = () => sent.map((r) => r.headers?.["Idempotency-Key"]);
const many = () => machineAct("stop", { names, size: 2500, claimed: 0, isKeeping: false });
const text = (lines: unknown[]) => lines.map(String).join(" ");

test("a request that is sent again has its key, and what was changed since has another", () => {
  const keyOf = keysByContent();
  const first = keyOf({ url: "a" });
  assert.equal(keyOf({ url: "a" }), first);
  const second = keyOf({ url: "b" });
  assert.notEqual(second, first);
  assert.equal(keyOf({ url: "b" }), second);
});

test("a request names at most 1,000 machines, and each machine is named once", async () => {
  const act = many();
  assert.match(text(act.consequences), /This takes 3 requests/);
  await act.run({});
  assert.deepEqual(
    bodies().map((b) => b.select.names?.length),
    [1000, 1000, 500],
  );
  assert.deepEqual(
    bodies().flatMap((b) => b.select.names),
    names,
  );
  assert.equal(new Set(keys()).size, 3);
  assert.match(text(act.consequences), /Recorded for 2.500 of 2.500 machines\./);
  assert.deepEqual(
    act.command.split("\n").map((line) => line.split(" ").length - 3),
    [1000, 1000, 500],
  );
  sent = [];
  await machineAct("stop", { catalog: "desk", size: 2500, claimed: 0, isKeeping: false }).run({});
  assert.deepEqual(
    bodies().map((b) => b.select),
    [{ catalog: "desk" }],
  );
});

test("a part that is refused is named, and the others are done", async () => {
  refused = 2;
  const act = many();
  await assert.rejects(act.run({}), {
    message:
      "Recorded for 1\u2009500 of 2\u2009500 machines. Refused for 1\u2009000 (m-1001 to m-2000): there is no machine 'm-1500'",
  });
  // Sent again, it does nothing twice.
  const before = keys();
  sent = [];
  refused = null;
  await act.run({});
  assert.deepEqual(keys(), before);
});

test("only what the daemon refused is called refused", async () => {
  const outcome = async (act: { run(values: object): Promise<unknown> }) =>
    act.run({}).then(
      () => assert.fail("it was done"),
      (error: unknown) => headingOf(error),
    );
  const one = () => machineAct("stop", { names: ["a"], size: 1, claimed: 0, isKeeping: false });
  refused = 1;
  assert.equal(await outcome(one()), "Refused.");
  refused = null;
  sent = [];
  lost = 1;
  assert.equal(await outcome(one()), "Not known whether it was done.");
  sent = [];
  assert.equal(await outcome(many()), "", "the message says of each part what has become of it");
});

test("after a request without an answer, nothing more is asked for", async () => {
  lost = 2;
  await assert.rejects(many().run({}), {
    message:
      "Recorded for 1\u2009000 of 2\u2009500 machines. Not known for 1\u2009000 (m-1001 to m-2000): The daemon does not answer. Not asked for the other 500.",
  });
  assert.equal(sent.length, 2);
  sent = [];
  lost = null;
  refused = 1;
  const one = machineAct("stop", { names: ["a"], size: 1, claimed: 0, isKeeping: false });
  await assert.rejects(one.run({}), { message: "there is no machine 'm-1500'" }, "one part is all of it");
});

test("what is kept is said of each machine, and not guessed", () => {
  assert.deepEqual([keepsData(undefined), keepsData(POOLED.spec), keepsData(KEPT.spec)], [null, false, true]);
  assert.deepEqual([[true, true], [true, false], [true, null], [false, null], [false]].map(keeping), [
    true,
    "some",
    "some",
    null,
    false,
  ]);
  const rows = [row("a", "pooled"), row("b", "kept"), row("c", "pooled")];
  const both = machinesTarget(["a", "b"], rows, [POOLED, KEPT]);
  assert.deepEqual(both, {
    names: ["a", "b"],
    size: 2,
    claimed: 1,
    isKeeping: "some",
    graceSeconds: undefined,
  });
  assert.match(
    text(machineAct("stop", both).consequences),
    /keeps data keep what they wrote\. What the others/,
  );
  const one = machinesTarget(["a", "c"], rows, [POOLED, KEPT]);
  assert.deepEqual([one.isKeeping, one.graceSeconds], [false, 9]);
  // The catalogs have not come yet.
  const unknown = machinesTarget(["a"], rows, undefined);
  assert.equal(unknown.isKeeping, null);
  for (const action of ["stop", "restart", "drain"] as const) {
    assert.match(text(machineAct(action, unknown).consequences), /is kept is not known/, action);
  }
  const reset = machineAct("reset", unknown);
  assert.match(text(reset.consequences), /if one keeps data, the daemon refuses/);
  assert.doesNotMatch(reset.command, /discard/);
});

test("where kept data of several is lost, their number has to be typed", async () => {
  const rows = [row("a", "kept"), row("b", "kept")];
  const one = machineAct("reset", machinesTarget(["a"], rows, [KEPT]));
  assert.equal(one.typed, "a");
  const two = machineAct("reset", machinesTarget(["a", "b"], rows, [KEPT]));
  assert.equal(two.typed, "2");
  assert.match(text(two.consequences), /To confirm, type how many machines these are: 2\./);
  const all = (of: Catalog, size: number) => ({
    catalog: of.name,
    size,
    claimed: 0,
    isKeeping: keepsData(of.spec),
  });
  assert.equal(machineAct("reset", all(KEPT, 7)).typed, "kept");
  const several = catalogsAct("reset", [all(KEPT, 7), all(POOLED, 5)]);
  assert.deepEqual([several.title, several.typed], ["Reset the 12 machines of 2 catalogs?", "12"]);
  assert.match(text(several.consequences), /The catalogs: kept, pooled\. Kept data is lost in kept\./);
  assert.equal(
    several.command,
    "spillway machine reset --catalog kept --discard-data\nspillway machine reset --catalog pooled",
  );
  await several.run({});
  assert.deepEqual(
    bodies().map((b) => [b.select.catalog, b.discard_data]),
    [
      ["kept", true],
      ["pooled", undefined],
    ],
  );
  assert.equal(catalogsAct("reset", [all(POOLED, 5), all(POOLED, 6)]).typed, undefined);
});

test("a machine is deleted as it was seen", async () => {
  const machine = { name: "a", catalog: "kept" } as Machine;
  await deleteMachine(machine, KEPT, '"12"').run({});
  assert.deepEqual([sent[0]?.method, sent[0]?.headers?.["If-Match"]], ["DELETE", '"12"']);
  const of = (c: Catalog | undefined) => deleteMachine(machine, c, null);
  assert.deepEqual([of(KEPT).typed, of(POOLED).typed, of(undefined).typed], ["a", undefined, "a"]);
  assert.match(text(of(undefined).consequences), /Whether files of its data stay on the host is not known/);
});
