import "./dom.ts";
import assert from "node:assert/strict";
import { test } from "node:test";
import type { Catalog, ImageDetails, Operation, Schemas, Store } from "../src/api/client.ts";
import {
  deleteImage,
  deleteImageReason,
  deleteVersion,
  publishVersion,
  tagVersion,
} from "../src/image-acts.ts";
import { commitMachine, downloadImage, importFile } from "../src/image-imports.ts";
import { changeResidency, pullImage, pushImage } from "../src/image-pulls.ts";
import {
  addressReason,
  askedText,
  type Cached,
  deleteReason,
  marks,
  outcomeText,
  progressOf,
  publishLines,
  residencyText,
  spaceText,
  usesOf,
  type Version,
} from "../src/image-words.ts";
import { bootText, offersOf } from "../src/pages/image-version.tsx";
import { contents, streamedFrom } from "../src/pages/store-contents.ts";
import { addRegistry, addStore, collectGarbage, deleteInRegistry } from "../src/registry-acts.ts";
import type { Act, Values } from "../src/ui/dialog.tsx";

const version = (n: number, more: object = {}): Version =>
  ({
    image: "golden",
    version: n,
    state: "ready",
    origin: { kind: "import", path: "/g.raw", format: "raw" },
    store: "default",
    size_bytes: 2 ** 24,
    stored_bytes: 8192,
    created: "2026-01-01T00:00:00Z",
    ...more,
  }) as Version;
const fromHub = { origin: { kind: "registry", registry: "hub", image: "golden:1" } };
const streamed = version(1, { ...fromHub, residency: "lazy" });
const details = (versions: Version[], image: object = {}): ImageDetails => ({
  image: {
    name: "golden",
    published: 1,
    newest: 2,
    tags: { "last-good": 1 },
    created: "2026-01-01T00:00:00Z",
    ...image,
  },
  versions,
});
const catalog = (name: string, spec: object, history: number[], more: object = {}): Catalog =>
  ({
    name,
    spec: { image: "golden", count: 3, ...spec },
    version: history.at(-1),
    history: history.map((n) => ({ image: "golden", version: n, since: "2026-01-01T00:00:00Z" })),
    ...more,
  }) as unknown as Catalog;

const command = (act: Act, values: Values = {}) =>
  typeof act.command === "string" ? act.command : act.command(values);
const text = (act: Act) => act.consequences.join(" ");
const field = (act: Act, key: string) => act.fields?.find((f) => f.key === key) ?? assert.fail(key);

test("who uses a version is said, and a version in use is not offered to be deleted", () => {
  const uses = usesOf("golden", [
    catalog("desk", {}, [1, 2]),
    catalog("lab", {}, [1]),
    catalog("back", {}, [1, 2, 1]),
    catalog("other", { image: "debian" }, []),
  ]);
  assert.deepEqual(uses.get(1), { next: ["lab", "back"], before: ["desk"], left: [] });
  assert.deepEqual(uses.get(2), { next: ["desk"], before: ["back"], left: [] });
  const both = details([version(1), version(2)]);
  assert.match(String(deleteReason(both, version(1), undefined)), /publish another version first/);
  assert.match(String(deleteReason(both, version(2), uses.get(2))), /^desk, back have it in their history/);
  assert.equal(deleteReason(both, version(2), undefined), null);
  const tagged = details([version(1), version(2)], { published: 2 });
  assert.match(String(deleteReason(tagged, version(1), undefined)), /tagged last-good/);
  assert.match(String(deleteReason(both, version(2, { state: "importing" }), undefined)), /cancel/);
  assert.equal(deleteImageReason(both, uses), "3 catalogs use it: back, desk, lab.");
  assert.equal(deleteImageReason(both, new Map()), null);
  const disk = { path: "/x", image: "golden", version: 2 };
  const left = usesOf("golden", [], [{ uuid: "u", machine: "old-1", catalog: "c", deleted: "", disk }]);
  assert.match(String(deleteReason(both, version(2), left.get(2))), /^What old-1 left needs it/);
  assert.match(String(deleteImageReason(both, left)), /^What old-1 left needs it/);
});

test("a publication says what each catalog takes", () => {
  const lines = publishLines(
    "golden",
    2,
    [
      catalog("desk", {}, [1]),
      catalog("lab", { image: "golden:1" }, [1]),
      catalog("new", {}, [2]),
      catalog("own", { type: "dedicated", count: 1 }, [1], { rollout: {} }),
      catalog("other", { image: "debian" }, []),
    ],
    new Map([
      ["desk", 2],
      ["own", 0],
    ]),
  );
  assert.deepEqual(lines, [
    "desk: 3 machines take golden:2 instead of version 1 at their next start. 2 run now, and are not restarted.",
    "new has golden:2 already.",
    "own: 1 machine takes golden:2 instead of version 1 at its next start. None runs now.",
    "The rollout of own that is in progress continues with golden:2.",
    "Machines of own keep their disks, and their version until they are reset.",
    "lab names a version and stays on it.",
  ]);
  assert.match(String(publishLines("golden", 2, [], new Map())[0]), /^No catalog follows the image/);
  // Before the first figures nobody knows how many run.
  const early = publishLines("golden", 2, [catalog("desk", {}, [1])], new Map()).join();
  assert.match(early, /Those that run are not restarted\.$/);
  const act = publishVersion({ details: details([]), etag: '"7"' }, version(2), [], new Map());
  assert.equal(command(act), "spillway image publish golden:2");
  assert.equal(act.typed, undefined);
});

test("how much of a version is here", () => {
  const cached = (more: object) =>
    ({ version: 1, residency: "lazy", chunks: 16, present_chunks: 15, is_whole: false, ...more }) as Cached;
  assert.equal(residencyText(version(1), undefined), "copied, whole");
  assert.equal(residencyText(streamed, cached({})), "streamed (lazy), 93% is here");
  assert.equal(
    residencyText(streamed, cached({ residency: "full", is_whole: true })),
    "streamed (full), complete",
  );
  assert.match(residencyText(streamed, undefined), /cannot be told/);
  assert.match(askedText(streamed, cached({ residency: "boot" })), /imported with lazy.*asks for boot/);
  assert.equal(askedText(streamed, cached({})), "");
  const bring = changeResidency(streamed, { registry: "hub", image: "golden:1" }, "full");
  assert.equal(command(bring), "spillway image import golden --from hub/golden:1 --residency full");
  assert.match(text(bring), /does not need the registry any more/);
});

test("acts on a version are possible or have their reason", () => {
  const reasons = (v: Version, registries: Schemas["Registry"][] = []) =>
    Object.fromEntries(
      offersOf({
        tagged: { details: details([v, version(2)]), etag: null },
        version: v,
        uses: undefined,
        catalogs: [],
        registries,
        isOffered: true,
      }).map((o) => [o.verb, o.reason]),
    );
  const web = { name: "web", url: "https://h/p" };
  const hub = { name: "hub", url: "s3://b/p" };
  assert.match(String(reasons(version(2), [web]).Push), /no registry that can be written/);
  assert.equal(reasons(version(2), [web, hub]).Push, null);
  assert.match(String(reasons(version(2)).Stream), /under another name/);
  const of = reasons(streamed, [hub]);
  assert.match(String(of.Push), /streamed/);
  assert.match(String(of.Verify), /streamed/);
  assert.equal(of["Fetch all"], null);
  assert.equal(of["Stream on demand"], undefined, "it is what it has");
  assert.equal(of.Publish, "It is published.");
  assert.equal(of["Remove the tag last-good"], null);
  assert.match(String(reasons(version(2, { state: "importing" })).Publish), /wait for the operation/);
});

test("the format of a file is chosen, and passwords in addresses are not repeated", () => {
  const file = importFile(["default"]);
  assert.deepEqual(field(file, "format").options?.[0], ["", "choose the format of the file"]);
  assert.equal(field(file, "format").isRequired, true);
  assert.equal(
    command(file, { name: "golden", from: "/a b.img", format: "raw", store: "nas" }),
    "spillway image import golden '/a b.img' --format raw --store nas",
  );
  assert.equal(command(file), "spillway image import NAME FILE --format FORMAT");
  assert.match(text(importFile([], details([]))), /^It becomes version 3 of golden/);
  const download = downloadImage([]);
  const shown = (url: string) => command(download, { name: "g", url, format: "qcow2" });
  assert.equal(shown("https://me:secret@h/a"), "spillway image import g URL --format qcow2");
  assert.equal(shown("https://h/a?sig=secret"), "spillway image import g 'https://h/a?QUERY' --format qcow2");
  assert.match(shown("oci://quay.io/a/b:1"), /oci:\/\/quay\.io\/a\/b:1/);
  assert.equal(field(download, "sha256").check?.("ab") === null, false);
  assert.equal(field(download, "sha256").check?.("ab".repeat(32)), null);
});

test("pulls, pushes, tags and commits as commands", () => {
  const hub = { name: "hub", url: "s3://b/p" };
  const pull = pullImage([hub], []);
  assert.equal(command(pull, { registry: "hub", image: "debian:3" }), "spillway image pull hub/debian:3");
  assert.equal(
    command(pull, { registry: "hub", image: "debian:3", name: "kiosk", residency: "boot" }),
    "spillway image import kiosk --from hub/debian:3 --residency boot",
  );
  assert.equal(
    command(pullImage([hub], [], { name: "golden" }), { registry: "hub", image: "debian:3" }),
    "spillway image import golden --from hub/debian:3",
  );
  assert.equal(field(pull, "image").check?.("debian:0") === null, false);
  const push = pushImage(version(2), [hub, { name: "web", url: "http://h/p" }]);
  assert.deepEqual(field(push, "registry").options, [["hub", "hub, s3://b/p"]]);
  assert.equal(command(push, { registry: "hub" }), "spillway image push golden:2 hub");
  const tag = tagVersion({ details: details([]), etag: null }, version(2));
  assert.match(text(tag), /last-good \(version 1\) would move here/);
  assert.equal(command(tag, { tag: "x" }), "spillway image tag golden:2 x");
  const commit = commitMachine("golden", [
    { machine: "a-1", reason: null },
    { machine: "a-2", reason: "a-2 is not off: stop it first." },
  ]);
  assert.equal(field(commit, "machine").check?.("a-1"), null);
  assert.match(String(field(commit, "machine").check?.("a-2")), /not off/);
  assert.equal(
    command(commit, { machine: "a-1", publish: "yes" }),
    "spillway image commit a-1 --name golden --publish",
  );
});

test("a name is typed where the only copy is lost, and nowhere else", () => {
  const both = details([version(1), version(2)]);
  const own = deleteVersion({ details: both, etag: null }, version(2));
  assert.equal(own.typed, "golden:2");
  assert.match(text(own), /there is no other copy/);
  const copy = deleteVersion({ details: details([streamed]), etag: null }, streamed);
  assert.equal(copy.typed, undefined);
  assert.match(text(copy), /can be pulled again.*It is the last version/);
  assert.equal(deleteImage({ details: both, etag: null }).typed, "golden");
  assert.match(text(deleteImage({ details: both, etag: null })), /^2 versions are gone: 1, 2; 16\.0 KiB/);
  assert.equal(deleteImage({ details: details([streamed]), etag: null }).typed, undefined);
  assert.equal(deleteInRegistry("hub", "golden:1", () => {}).typed, "hub/golden:1");
});

test("registries have no password in an address, and credentials are the path of a file", () => {
  assert.match(String(addressReason("https://me:secret@h/p")), /no user and password/);
  assert.match(String(addressReason("ftp://h/p")), /s3:\/\/BUCKET/);
  assert.match(String(addressReason("s3://b/p?x=1")), /no spaces/);
  for (const url of ["s3://b/p", "https://h/p@x", "file:///srv/hub"])
    assert.equal(addressReason(url), null, url);
  assert.match(String(addressReason("s3://b", true)), /https:\/\/HOST/);
  const act = addRegistry();
  assert.equal(
    command(act, { name: "hub", url: "s3://b/p", credentials: "/etc/spillway/hub", single: "yes" }),
    "spillway registry add hub s3://b/p --credentials /etc/spillway/hub --single-writer",
  );
  const wrong = command(act, { name: "hub", url: "https://me:secret@h/p", credentials: "AKIA/secret" });
  assert.equal(wrong, "spillway registry add hub URL --credentials FILE");
  assert.equal(command(collectGarbage("hub", true)), "spillway registry gc hub --delete");
  assert.equal(
    command(addStore(), { name: "nas", path: "/srv/x", class: "shared" }),
    "spillway store add nas /srv/x --class shared",
  );
});

test("operations say how far they are, and what they have done", () => {
  const operation = (more: object) =>
    ({ id: 1, what: "w", state: { phase: "running" }, done_bytes: 1, total_bytes: 0, ...more }) as Operation;
  assert.equal(progressOf(operation({})), null);
  assert.equal(progressOf(operation({ total_bytes: 4 })), 0.25);
  assert.equal(progressOf(operation({ state: { phase: "done" } })), 1);
  assert.equal(outcomeText(operation({})), null);
  const pushed = {
    was_there: true,
    chunks: 9,
    shared_chunks: 4,
    found_chunks: 3,
    sent_chunks: 2,
    sent_bytes: 2048,
  };
  assert.equal(
    outcomeText(operation({ outcome: { pushed } })),
    "The registry had it already. 9 chunks: 4 shared with other versions of it, 3 found there, 2 sent (2.0 KiB).",
  );
  const collected = {
    versions: 1,
    chunks: 5,
    chunk_bytes: 5120,
    pushes: 0,
    garbage_chunks: 2,
    garbage_bytes: 2048,
    garbage_images: 1,
    dead_pushes: 0,
    deletable: 3,
    has_deleted: false,
  };
  const said = (more: object) =>
    outcomeText(operation({ outcome: { collected: { ...collected, ...more } } }));
  assert.match(String(said({})), /3 objects could be deleted now\.$/);
  assert.match(String(said({ has_deleted: true })), /3 objects were deleted\.$/);
  assert.match(String(said({ deletable: 0 })), /Nothing can be deleted yet/);
  assert.match(String(said({ garbage_chunks: 0, garbage_images: 0 })), /0 interrupted pushes\.$/);
});

test("stores say their marks, what is on them, and that they cannot be read", () => {
  const gib = 2 ** 30;
  assert.deepEqual(marks(100 * gib), { warning: 20 * gib, critical: 10 * gib });
  assert.deepEqual(marks(1000 * gib), { warning: 64 * gib, critical: 16 * gib });
  const store = (name: string, cls: string): Store =>
    ({ name, path: `/srv/${name}`, class: cls, space: null }) as Store;
  const stores = [store("nas", "shared"), store("ssd", "local")];
  assert.match(spaceText(store("nas", "shared")), /is its file system mounted/);
  const images = [details([version(1, { store: "nas" }), streamed])];
  const catalogs = [
    catalog("desk", {}, [1]),
    catalog("ram", { mode: "ram" }, [1]),
    catalog("own", { type: "dedicated", data_disk_bytes: 1, data_disk_store: "nas" }, [1]),
  ];
  const left = [
    { uuid: "u", machine: "old-1", data_disk: "/srv/ssd/data/u" },
  ] as unknown as Schemas["Leftover"][];
  const on = (n: number) => contents(stores[n] as Store, stores, images, catalogs, left);
  assert.deepEqual(on(0), ["1 version of images, 8.0 KiB: golden:1.", "Data disks of own."]);
  assert.deepEqual(on(1), ["Disks of desk (overflow), own (kept).", "1 leftover: old-1."]);
  assert.deepEqual(streamedFrom("hub", images), ["golden:1"]);
  assert.deepEqual(streamedFrom("other", images), []);
});

test("what firmware finds, as the command says it", () => {
  assert.equal(
    bootText({
      partition_table: "gpt",
      bios_code: false,
      efi_partition: 1,
      efi_programs: ["/EFI/BOOT/BOOTX64.EFI"],
    }),
    "a GPT, no code for a BIOS, an EFI system partition (1), /EFI/BOOT/BOOTX64.EFI",
  );
});
