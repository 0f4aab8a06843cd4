import "./dom.ts";
import assert from "node:assert/strict";
import { test } from "node:test";
import {
  canEnlarge,
  changeAct,
  deleteCatalog,
  deleteMachine,
  enlargeAct,
  keepsData,
  machineAct,
  unclaimable,
} from "../src/acts.ts";
import type { Catalog, Event, Machine } from "../src/api/client.ts";
import { address } from "../src/api/client.ts";
import about from "../src/api/spec-fields.json";
import { createCommand, curl, machineNames, quote, toml, ttlText } from "../src/commands.ts";
import { outlook } from "../src/pages/catalog-versions.tsx";
import { troubles } from "../src/pages/host-troubles.tsx";
import { href, parseHash } from "../src/router.ts";
import { merge } from "../src/state/events.ts";
import { Moments } from "../src/state/moments.ts";
import { session } from "../src/state/session.ts";
import { transport } from "../src/transport.ts";
import { refusalOf } from "../src/ui/act-button.tsx";
import { boundError, FIELDS, read, shown } from "../src/ui/spec-form.tsx";

test("the fragment is the state", () => {
  const to = href(["catalogs", "a b"], { tab: "sizing", filter: "x&y", sort: undefined });
  const { parts, query } = parseHash(to);
  assert.deepEqual(parts, ["catalogs", "a b"]);
  assert.deepEqual(Object.fromEntries(query), { tab: "sizing", filter: "x&y" });
  assert.deepEqual(parseHash("").parts, []);
  assert.deepEqual(parseHash("#/%E0%A4%A").parts, ["%E0%A4%A"], "what is no text stays as it is");
});

test("addresses are encoded", () => {
  assert.equal(
    address("/v1/machines/{name}", { name: "a/b" }, { wait: 5, x: undefined }),
    "/v1/machines/a%2Fb?wait=5",
  );
});

test("events come once, the newest first", () => {
  const event = (n: number): Event => ({
    id: `h-${n}`,
    kind: "ready",
    object: "machine/a",
    text: "",
    time: "2026-01-01T00:00:00Z",
  });
  const first = merge([], [event(1), event(2)]);
  assert.deepEqual(
    first.map((e) => e.id),
    ["h-2", "h-1"],
  );
  const next = merge(first, [event(2), event(3)]);
  assert.deepEqual(
    next.map((e) => e.id),
    ["h-3", "h-2", "h-1"],
  );
  assert.equal(merge(next, [event(3)]), next, "nothing new changes nothing");
  assert.deepEqual(
    merge(next, [event(4)], 2).map((e) => e.id),
    ["h-4", "h-3"],
  );
});

test("the same catalog as a command, a file and a request; what is absent is absent", () => {
  const spec = {
    image: "debian",
    count: 2,
    ram_bytes: 2 ** 29,
    network: { bridge: "br0" },
    labels: { team: "a b" },
    autostart: true,
    claim_ttl_seconds: 7200,
    authorized_keys: [],
  };
  assert.equal(
    createCommand("desk", spec),
    "spillway catalog create desk \\\n    --image debian \\\n    --count 2 \\\n    --ram 512M \\\n    --network bridge=br0 \\\n    --claim-ttl 2h \\\n    --autostart \\\n    --label 'team=a b'",
  );
  assert.equal(
    toml("desk", spec),
    '[catalogs.desk]\nimage = "debian"\ncount = 2\nram_bytes = "512M"\nnetwork = { bridge = "br0" }\nclaim_ttl_seconds = 7200\nautostart = true\nlabels = { team = "a b" }',
  );
  assert.match(curl("POST", "/v1/catalogs", { name: "it's" }), /-d '\{"name":"it'\\''s"\}'/);
  assert.equal(quote("a b"), "'a b'");
  assert.deepEqual([0, 90, 1800, 86_400].map(ttlText), ["none", "90s", "30m", "1d"]);
});

test("names of machines are shown before there are any", () => {
  assert.deepEqual(machineNames("desk-##", 2), ["desk-01", "desk-02"]);
  assert.deepEqual(machineNames("desk-###", 1500), ["desk-001", "desk-002", "desk-003", "desk-1500"]);
  assert.deepEqual(machineNames("desk", 3), []);
});

test("each setting of the API has a field", () => {
  const fields = new Set<string>([...FIELDS.map((f) => f.key), "image"]);
  assert.deepEqual(
    Object.keys(about).filter((key) => !fields.has(key)),
    [],
  );
});

test("fields say what is wrong with the daemon's bounds", () => {
  const field = (key: string) => FIELDS.find((f) => f.key === key) ?? assert.fail(key);
  assert.deepEqual(read(field("ram_bytes"), "1K"), { error: "The least is 64K." });
  assert.deepEqual(read(field("ram_bytes"), " "), { value: undefined });
  assert.deepEqual(read(field("memory_bytes"), "1G"), { value: 2 ** 30 });
  assert.equal(boundError("memory_bytes", 2 ** 30 + 1), "It must be a multiple of 1M.");
  assert.deepEqual(read(field("labels"), "a=1, b=2"), { value: { a: "1", b: "2" } });
  assert.deepEqual(read(field("network"), "bridge=br0"), { value: { bridge: "br0" } });
  assert.equal("error" in read(field("network"), "br0"), true);
  assert.equal(shown(field("network"), { bridge: "br0" }), "bridge=br0");
});

test("what is lost is named, and has to be typed where it was kept", () => {
  const lost = machineAct("reset", { names: ["a"], size: 1, claimed: 1, isKeeping: true });
  assert.equal(lost.typed, "a");
  assert.match(lost.command, /--discard-data$/);
  assert.match(String(lost.consequences[0]), /is gone/);
  const restart = (isKeeping: boolean) =>
    machineAct("restart", { names: ["a"], size: 1, claimed: 0, isKeeping }).consequences.join(" ");
  assert.match(restart(true), /A machine that keeps its disk keeps its version\./);
  assert.match(restart(false), /with the version that their catalog has now/);
  const stop = machineAct("stop", { catalog: "desk", size: 3, claimed: 0, isKeeping: false });
  assert.equal(stop.typed, undefined);
  assert.equal(stop.command, "spillway machine stop --catalog desk");
  assert.equal(keepsData({ image: "a", type: "dedicated" }), true);
  assert.equal(keepsData({ image: "a" }), false);
});

test("an update says in numbers what it will do", () => {
  const machine = (version: number, claimed: boolean) =>
    ({ claim: claimed ? {} : null, status: { run: { image: "debian", version } } }) as unknown as Machine;
  const all = [machine(1, false), machine(1, true), machine(1, false), machine(2, false)];
  const update = { image: "debian", version: 2, strategy: { batch: 2 }, isKeeping: false };
  assert.deepEqual(outlook(all, update), [
    "3 running machines have another version; 1 of 4 have debian:2 already.",
    "2 machines are restarted, 2 at a time: 1 batch.",
    "1 machine is claimed, and not restarted until released.",
  ]);
  const claimed = outlook(all, { ...update, claimGraceSeconds: 30 }).at(-1);
  assert.equal(claimed, "1 machine is claimed, and restarted after 30 s also if somebody uses them.");
  assert.deepEqual(outlook(all.slice(3), { ...update, strategy: "now" }), [
    "The one machine that runs has debian:2 already.",
  ]);
  const kept = { ...update, strategy: "next-start" as const, isKeeping: true };
  for (const machines of [all, []]) {
    const lines = outlook(machines, kept).join(" ");
    assert.match(lines, /each stays at its version until the machine is reset\.$/);
    assert.doesNotMatch(lines, /each takes/i);
  }
});

test("what deletes machines says so, and has to be confirmed", () => {
  const catalog = { name: "desk", revision: 3, spec: { image: "debian", count: 40 } } as unknown as Catalog;
  const fewer = changeAct(catalog, { count: 3 }, "Change desk?", ["Machines: 40 becomes 3, at once."]);
  assert.match(
    fewer.consequences.join(" "),
    /^37 machines are deleted, .* Those that run are ended\. What they wrote is gone\./,
  );
  assert.deepEqual([fewer.isDestructive, fewer.typed], [true, "desk"]);
  const more = changeAct(catalog, { count: 41 }, "Change desk?", []);
  assert.deepEqual([more.isDestructive, more.typed], [undefined, undefined]);
  // A number that is emptied is the daemon's default, which is none.
  for (const effective of [undefined, { ...catalog.spec, count: 0 }]) {
    const none = changeAct(catalog, { count: undefined }, "Change desk?", [], effective);
    assert.match(none.consequences.join(" "), /^40 machines are deleted/);
    assert.deepEqual([none.isDestructive, none.typed], [true, "desk"]);
  }
  const kept = { ...catalog, spec: { ...catalog.spec, reset: "never" } } as typeof catalog;
  const forgetting = changeAct(kept, { reset: undefined }, "Change desk?", []);
  assert.match(forgetting.consequences.join(" "), /^The machines no longer keep what they write/);
  assert.equal(forgetting.typed, "desk");
  const gone = deleteCatalog(catalog, 2).consequences.join(" ");
  assert.match(
    gone,
    /2 machines that are on are ended at once\. The daemon refuses this while a machine is claimed\.$/,
  );
});

test("where the data of deleted machines is, is said as it is", () => {
  const catalogOf = (spec: object) =>
    ({ name: "desk", spec: { image: "debian", count: 1, ...spec } }) as unknown as Catalog;
  const machine = { name: "desk-1", catalog: "desk" } as unknown as Machine;
  const ways: [object, boolean, boolean][] = [
    // The settings, whether the machine keeps data, and whether files of it stay.
    [{}, false, false],
    [{ reset: "never" }, true, false],
    [{ type: "dedicated" }, true, true],
    [{ data_disk_bytes: 5 }, false, true],
  ];
  for (const [spec, isKeeping, isLeaving] of ways) {
    const catalog = catalogOf(spec);
    const one = deleteMachine(machine, catalog, null);
    const all = deleteCatalog(catalog, 1);
    for (const { consequences } of [one, all]) {
      const said = consequences.join(" ");
      assert.equal(
        said.includes("stay on the host as leftovers"),
        isLeaving,
        `${JSON.stringify(spec)}: ${said}`,
      );
      assert.equal(said.includes("nothing of it stays on the host"), !isLeaving, said);
    }
    assert.equal(all.consequences.join(" ").includes("after the grace period"), isLeaving);
    assert.equal(one.typed !== undefined, isKeeping || isLeaving, JSON.stringify(spec));
    assert.equal(unclaimable(catalog.spec) === null, !isKeeping && !isLeaving);
  }
  const unknown = deleteMachine(machine, undefined, null);
  assert.match(unknown.consequences.join(" "), /is not known/);
  assert.equal(unknown.typed, "desk-1");
});

test("a full cache gets twice its limit: that which decides when it is full", async () => {
  const catalogOf = (spec: object) =>
    ({ name: "desk", spec: { image: "a", count: 3, ...spec } }) as unknown as Catalog;
  const of = (spec: object) => enlargeAct(catalogOf(spec));
  const limits = { ram_bytes: 2 ** 22, overflow_bytes: 2 ** 26 };
  const both = await of({ mode: "ram+overflow", ...limits });
  assert.match(String(both.consequences[0]), /^The limit changes from 64\.0 MiB to 128\.0 MiB/);
  assert.match(String(both.consequences.at(-1)), /384\.0 MiB in their store: 3 machines of 128\.0 MiB\.$/);
  assert.match(String(both.command), /overflow_bytes = "128M"/);
  assert.match(String((await of({ mode: "ram", ...limits })).command), /ram_bytes = "8M"/);
  // The daemon says what its default is.
  let asked = "";
  const { request } = transport;
  transport.request = async ({ method, path }) => {
    asked = `${method} ${path}`;
    return { status: 200, etag: null, body: { effective: { overflow_bytes: 2 ** 30 } } };
  };
  const unset = await of({});
  transport.request = request;
  assert.equal(asked, "PUT /v1/catalogs/desk?dry_run=true");
  assert.match(String(unset.command), /overflow_bytes = "2G"/);
  const can = [{}, { mode: "ram" }, { mode: "direct" }, { mode: "ephemeral" }, { type: "dedicated" }];
  assert.deepEqual(
    can.map((spec) => canEnlarge(catalogOf(spec))),
    [true, true, false, false, false],
  );
});

test("who may not discard kept data resets nothing before it is known whether there is any", () => {
  const reasons = (role: "operate" | "admin") => {
    session.value = { is: "in", session: { caller: "ann", role, by: "session", seconds_left: null } };
    return [false, null, true, "some" as const].map((kept) => refusalOf("reset", kept));
  };
  const [free, unknown, ...kept] = reasons("operate");
  assert.equal(free, null);
  assert.match(unknown ?? "", /is not known yet/);
  for (const reason of kept) assert.match(reason ?? "", /keep their data/);
  assert.equal(refusalOf("restart", null), null);
  assert.deepEqual(reasons("admin"), [null, null, null, null]);
});

test("what is wrong comes first, and nothing wrong is nothing", () => {
  const moments = new Moments();
  const catalog = (levels: object, machines: object) => ({
    name: "desk",
    machines,
    warm: 0,
    disks: 1,
    unresponsive_disks: 0,
    levels,
    counters: {},
    spared_bytes: 0,
  });
  const figures = (levels: object, machines: object) => ({
    time: "2026-01-01T00:00:00Z",
    since: "2026-01-01T00:00:00Z",
    machines: [],
    stores: [],
    catalogs: [catalog(levels, machines)],
  });
  moments.add(figures({ warning: 2, critical: 1, full: 1 }, { failed: 1 }));
  assert.deepEqual(
    troubles(undefined, [], moments.catalogs(), []).map((t) => t.key),
    ["full/desk", "failed/desk", "warning/desk"],
  );
  const desk = { name: "desk", spec: { image: "a", overflow_bytes: 2 ** 26 } } as unknown as Catalog;
  assert.deepEqual(
    troubles(undefined, [], moments.catalogs(), [desk]).map((t) => t.mend?.verb),
    ["Double the limit", "Start them again", undefined],
    "what mends it is offered beside it",
  );
  assert.equal(troubles(undefined, [], moments.catalogs(), [])[0]?.mend, undefined, "of a known catalog");
  moments.clear();
  moments.add(figures({}, { running: 3 }));
  assert.deepEqual(troubles(undefined, [], moments.catalogs(), []), []);
  const store = {
    name: "s",
    path: "/s",
    class: "local" as const,
    space: { total_bytes: 100, free_bytes: 50, level: "normal" as const, seconds_to_full: 3600 },
  };
  assert.deepEqual(
    troubles(undefined, [store], [], []).map((t) => t.tone),
    ["warning"],
  );
  const of = (stores: Parameters<typeof troubles>[1], answered: string[] | undefined) =>
    troubles(
      undefined,
      stores,
      [],
      [],
      answered?.map((name) => ({ name, size_bytes: 100, free_bytes: 50 })),
    ).map((t) => [t.tone, t.key, t.what]);
  const calm = { ...store, space: { ...store.space, seconds_to_full: null } };
  assert.deepEqual([of([calm], undefined), of([calm], ["s"])], [[], []]);
  assert.deepEqual(of([calm], ["t"]), [["critical", "store/s", "The store s has not answered in time"]]);
  const unmeasured = { ...store, space: null };
  assert.equal(of([unmeasured], [])[0]?.[0], "warning", "of a store that is new, nothing is known yet");
});
