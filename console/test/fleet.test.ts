import "./dom.ts";
import assert from "node:assert/strict";
import { test } from "node:test";
import { machineOf } from "../src/consoles/page.ts";
import {
  changeRollout,
  deleteCatalog,
  redactedReason,
  rollBack,
  scale,
  update,
} from "../src/fleet/catalog-acts.ts";
import {
  cordon,
  declareDead,
  drain,
  livingReason,
  removeHost,
  switchPlacer,
  uncordon,
} from "../src/fleet/host-acts.ts";
import {
  type FleetCatalog,
  type FleetDetails,
  type FleetHost,
  type FleetRollout,
  type FleetShare,
  fleetSettings,
  isOpen,
  keepsData,
  placerPath,
  placerText,
  rolloutText,
  rolloutTone,
  standing,
  totals,
} from "../src/fleet/words.ts";
import { href, parseHash } from "../src/router.ts";
import { hostOf, through } from "../src/shown-host.ts";
import { type Transport, transport } from "../src/transport.ts";
import type { Act, Values } from "../src/ui/dialog.tsx";

const command = (act: Act, values: Values = {}) =>
  typeof act.command === "string" ? act.command : act.command(values);
const text = (act: Act) => act.consequences.join(" ");

const share = (host: string, more: object = {}): FleetShare => ({
  ...{
    host,
    catalog: "desk",
    wanted: 2,
    version: 1,
    count: 2,
    ready: 2,
    off: 0,
    updated: 2,
    claimed: 0,
    failed: 0,
  },
  ...more,
});
const host = (more: object = {}): FleetHost =>
  ({
    ...{
      name: "h1",
      zone: "z1",
      labels: {},
      state: "alive",
      cordoned: false,
      draining: false,
      used_bytes: 0,
    },
    ...{ address: "10.0.0.1:9445", shares: [share("h1", { claimed: 1 })], memory_bytes: 2 ** 30 },
    ...more,
  }) as FleetHost;
const fleet = (more: object = {}): FleetDetails =>
  ({
    ...{ name: "site", host: "h0", membership: "member", places: true, placer: "h1", hosts: { alive: 2 } },
    ...{ etcd: { members: [], revision: 1 } },
    ...more,
  }) as FleetDetails;
const rollout = (more: object = {}): FleetRollout => ({
  ...{ state: "running", from_image: "debian", from_version: 3, to_image: "debian", to_version: 4 },
  ...{ wave: 2, waves: 4, hosts_started: 2, hosts_done: 1, hosts: 8, failed: 0, max_failed: 0 },
  ...{ deadline_seconds: 600, since: "2026-01-01T00:00:00Z", changed: "2026-01-01T00:00:00Z" },
  ...more,
});
const catalog = (more: object = {}, spec: object = {}): FleetCatalog =>
  ({
    ...{ name: "desk", revision: 7, version: 4, strategy: { batch: 2 }, generation: 2, unplaced: 0 },
    spec: { image: "debian:3", count: 4, ...spec },
    history: [3, 4].map((version) => ({ image: "debian", version, since: "2026-01-01T00:00:00Z" })),
    created: "2026-01-01T00:00:00Z",
    shares: [share("h0"), share("h1", { claimed: 1, failed: 1 })],
    ...more,
  }) as unknown as FleetCatalog;

/** What an act sends. */
async function sent(act: Act, values: Values = {}): Promise<Parameters<Transport["request"]>[0]> {
  const requests: Parameters<Transport["request"]>[0][] = [];
  const before = transport.request;
  transport.request = async (request) => {
    requests.push(request);
    return { status: 200, etag: null, body: {} };
  };
  try {
    await act.run(values);
  } finally {
    transport.request = before;
  }
  assert.equal(requests.length, 1);
  return requests[0] ?? assert.fail();
}

test("an address names the host that it shows, and nothing else becomes a part of a path", () => {
  assert.equal(hostOf("#/@h1/machines"), "h1");
  assert.equal(hostOf("#/@host-b"), "host-b");
  assert.equal(hostOf("#/@h1?tab=x"), "h1");
  for (const hash of [
    "",
    "#/",
    "#/machines/@h1",
    "#/@",
    "#/@../x",
    "#/@h1%2f..",
    "#/@H1",
    "#/@h1:80/x",
    "#/@h1\\x",
  ])
    assert.equal(hostOf(hash), null, hash);
  assert.deepEqual(parseHash("#/@h1/machines/desk-001?tab=serial").parts, ["machines", "desk-001"]);
  assert.equal(parseHash("#/@h1/machines/desk-001?tab=serial").query.get("tab"), "serial");
  assert.deepEqual(parseHash("#/@h1").parts, []);
  assert.deepEqual(parseHash("#/@../x").parts, ["@..", "x"]);
  assert.equal(href(["machines"], { state: "ready" }, "h1"), "#/@h1/machines?state=ready");
  assert.equal(href([], {}, "h1"), "#/@h1/");
  assert.deepEqual(parseHash(href(["catalogs", "a b"], {}, "h1")).parts, ["catalogs", "a b"]);
  assert.equal(href(["machines"]), "#/machines", "of the host that is shown");
});

test("requests go through the own daemon, but for sessions and the fleet", () => {
  assert.equal(through("/v1/machines?limit=1", "h1"), "/v1/fleet/hosts/h1/api/v1/machines?limit=1");
  assert.equal(
    through("/v1/machines/fleet/console", "h1"),
    "/v1/fleet/hosts/h1/api/v1/machines/fleet/console",
  );
  for (const path of ["/v1/session", "/v1/fleet", "/v1/fleet/hosts/h2", "/v1/fleet/hosts/h2/api/v1/fleet"])
    assert.equal(through(path, "h1"), path);
  assert.equal(through("/v1/machines", null), "/v1/machines");
});

test("a console's address may name a host", () => {
  assert.equal(machineOf("#/@h1/machines/desk-h1-001"), "desk-h1-001");
  assert.equal(machineOf("#/machines/desk-001"), "desk-001");
  for (const hash of ["#/@../machines/a", "#/@h1/@h2/machines/a", "#/@h1/machines/../x", "#/@h1/catalogs/a"])
    assert.equal(machineOf(hash), null, hash);
});

test("what only the host that places knows is asked of it", () => {
  assert.equal(placerPath(fleet(), "/v1/fleet"), "/v1/fleet/hosts/h1/api/v1/fleet");
  for (const own of [undefined, fleet({ placer: "h0" }), fleet({ placer: null })])
    assert.equal(placerPath(own, "/v1/fleet"), null);
  assert.equal(placerText(fleet()), "h1");
  assert.match(placerText(fleet({ places: false })), /^switched off/);
  assert.match(placerText(fleet({ placer: null })), /^none: a host is elected/);
});

test("how a host takes part is said, and only a member is called good", () => {
  for (const membership of ["member", "connecting", "no-fleet", "joining", "isolated", "refused"]) {
    const { tone, text } = standing(fleet({ membership }));
    assert.match(text, /h0/);
    assert.equal(tone === "good", membership === "member", membership);
  }
});

test("shares are counted, and hosts only if they are to have machines", () => {
  assert.deepEqual(totals([share("a"), share("b", { wanted: 0, ready: 1 }), share("c", { failed: 2 })]), {
    wanted: 4,
    ready: 4,
    claimed: 0,
    failed: 2,
    hosts: 2,
  });
});

test("acts on hosts say what they mean", async () => {
  assert.equal(command(cordon(host())), "spillway fleet host cordon h1");
  assert.match(text(drain(host())), /^2 machines are replaced .* 1 machine is claimed, and stay/);
  assert.match(text(uncordon(host({ draining: true }))), /The drain ends/);
  assert.doesNotMatch(text(uncordon(host())), /drain/);
  const dead = declareDead(host({ state: "silent" }));
  assert.equal(dead.typed, "h1");
  assert.match(text(dead), /only if you know that h1 is off.*there are more than were asked for/);
  assert.match(text(dead), /Machines that keep data are never replaced/);
  assert.match(text(removeHost(host())), /begin empty/);
  assert.deepEqual(await sent(dead), {
    ...{ method: "POST", path: "/v1/fleet/hosts/h1", body: { action: "declare-dead" }, headers: {} },
    signal: undefined,
  });
  assert.equal((await sent(removeHost(host()))).method, "DELETE");
  assert.deepEqual((await sent(switchPlacer(fleet()))).body, { enabled: false });
  assert.equal(command(switchPlacer(fleet({ places: false }))), "spillway fleet placer on");
});

test("a host that lives is neither declared dead nor removed", () => {
  assert.match(String(livingReason(host())), /renews its lease/);
  assert.equal(livingReason(host({ state: "silent", address: null })), null);
  assert.equal(livingReason(host({ state: "absent", address: null })), null);
});

test("a catalog is scaled from the revision that was read", async () => {
  const request = await sent(scale(catalog({}, { redacted: [], waves: ["1"] })), { count: "9" });
  assert.equal(request.path, "/v1/fleet/catalogs/desk");
  assert.equal(request.headers?.["If-Match"], '"7"');
  assert.deepEqual(request.body, { image: "debian:3", count: 9, waves: ["1"] });
  assert.equal(command(scale(catalog()), { count: "9" }), "spillway fleet catalog scale desk 9");
  const check = scale(catalog()).fields?.[0]?.check;
  assert.notEqual(check?.("three"), null);
  assert.equal(check?.("0"), null);
  assert.match(String(redactedReason(catalog({}, { redacted: ["user_data"] }))), /may not read user_data/);
  assert.equal(redactedReason(catalog()), null);
});

test("an update is sent as it is said", async () => {
  const act = update(catalog(), [5, 4]);
  assert.match(text(act), /^It has debian:4 now/);
  assert.match(text(update(catalog({ rollout: rollout() }), [])), /A rollout is under way/);
  const asked = { version: "5", how: "batch", batch: "3" };
  assert.equal(command(act, asked), "spillway fleet catalog update desk --image debian:5 --rollout batch=3");
  assert.deepEqual((await sent(act, asked)).body, { version: 5, strategy: { batch: 3 } });
  assert.deepEqual((await sent(act, { version: "5", how: "" })).body, { version: 5 });
  assert.equal(
    command(act, { version: "5", how: "now" }),
    "spillway fleet catalog update desk --image debian:5 --rollout now",
  );
});

test("a rollback goes to the version before, or to where a rollout began", async () => {
  assert.match(rollBack(catalog(), null).title, /to version 3\?$/);
  const begun = catalog({ rollout: rollout({ from_version: 2, state: "halted" }) });
  assert.match(rollBack(begun, null).title, /to version 2\?$/);
  assert.equal(command(rollBack(begun, null)), "spillway fleet catalog rollback desk");
  assert.deepEqual((await sent(rollBack(begun, null))).body, {});
  assert.deepEqual((await sent(rollBack(begun, 1))).body, { to: 1 });
  assert.equal(command(rollBack(begun, 1)), "spillway fleet catalog rollback desk --to 1");
});

test("a rollout is open until it has ended", async () => {
  for (const [state, open] of [
    ["prefetch", true],
    ["running", true],
    ["paused", true],
    ["halted", true],
    ["aborted", false],
    ["done", false],
  ] as const)
    assert.equal(isOpen(rollout({ state })), open, state);
  assert.equal(isOpen(undefined), false);
  assert.equal(rolloutText(rollout()), "to version 4, running, wave 2 of 4, 1 of 8 hosts");
  assert.equal(rolloutTone(rollout({ state: "halted" })), "critical");
  assert.equal(rolloutTone(rollout({ state: "of a later version" })), "note");
  const pause = changeRollout(catalog(), rollout(), "pause");
  assert.equal(command(pause), "spillway fleet catalog rollout pause desk");
  assert.deepEqual((await sent(pause)).body, { action: "pause" });
});

test("what is kept of deleted machines is said", () => {
  assert.match(text(deleteCatalog(catalog())), /What the machines wrote is gone/);
  for (const spec of [
    { type: "dedicated" },
    { reset: "never" },
    { data_disk_bytes: 1 },
    { mode: "persistent" },
  ]) {
    assert.equal(keepsData(catalog({}, spec)), true);
    assert.match(text(deleteCatalog(catalog({}, spec))), /stays on their hosts/);
  }
  assert.equal(keepsData(catalog()), false);
});

test("settings of fleets are shown with their defaults", () => {
  const of = (spec: object) => Object.fromEntries(fleetSettings(catalog({}, spec)));
  assert.equal(of({}).Waves, "1, 10%, 50%, 100%");
  assert.equal(of({ zones: ["a", "b"] }).Zones, "a, b");
  assert.equal(of({ host_labels: { disk: "nvme" } })["Labels that a host needs"], "disk=nvme");
});
