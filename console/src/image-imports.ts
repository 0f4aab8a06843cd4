// Ways in: a version from a file of the host, from an address, and from the disk of a machine.
//
// Invariant: an address with a password, or what follows a `?` in one, never stands in a command.
import {
  all,
  api,
  type Catalog,
  type ImageDetails,
  type Machine,
  keysByContent,
  type Schemas,
} from "./api/client.ts";
import { line } from "./commands.ts";
import { begins, nameField, or, storeField } from "./image-acts.ts";
import { hasKeptDisks } from "./image-words.ts";
import type { Act, ActField, Values } from "./ui/dialog.tsx";

type Format = Schemas["SourceFormat"];

/** The format of a file is a question, as with the command: whoever guesses it can be deceived by the file. */
const formatField: ActField = {
  key: "format",
  label: "Format",
  isRequired: true,
  options: [
    ["", "choose the format of the file"],
    ["qcow2", "qcow2"],
    ["raw", "raw: the bytes of a disk"],
    ["vmdk", "VMDK"],
    ["vhdx", "VHDX"],
    ["vpc", "VHD (vpc)"],
  ],
  hint: "It is never guessed.",
};

/** What another version does, before somebody publishes it. */
function newVersionLine(details: ImageDetails | undefined): string {
  return details
    ? `It becomes version ${details.image.newest + 1} of ${details.image.name}. Machines do not take it before somebody publishes it.`
    : "The first version of an image is published. A later one is not, before somebody does that.";
}

/** What differs between an import and a download. */
interface Way {
  verb: string;
  consequences: string[];
  /** Where the file is. */
  from: ActField;
  /** What else is asked for. */
  more?: ActField[];
  /** The file and its options, as words of the command. */
  words(v: Values): string[];
  send(
    v: Values,
    request: { path: { name: string }; key: string },
    common: Common,
  ): Promise<{ body: unknown }>;
}
type Common = { format: Format; store?: string };

/** An act that makes a version of a file, whose name, format and store are asked for. */
function importAct(stores: string[], details: ImageDetails | undefined, way: Way): Act {
  const keyOf = keysByContent();
  const name = (v: Values) => details?.image.name ?? v.name ?? "";
  return {
    title: details ? `${way.verb} a version of ${details.image.name}` : `${way.verb} an image`,
    consequences: [newVersionLine(details), ...way.consequences],
    verb: way.verb,
    fields: [...(details ? [] : [nameField]), way.from, formatField, ...(way.more ?? []), storeField(stores)],
    command: (v) => {
      const [file = "", ...options] = way.words(v);
      const format = ["--format", or(v.format, "FORMAT")];
      const store = v.store ? ["--store", v.store] : [];
      return line("spillway", "image", "import", or(name(v), "NAME"), file, ...format, ...options, ...store);
    },
    run: async (v) => {
      const common = { format: v.format as Format, ...(v.store ? { store: v.store } : {}) };
      return (await way.send(v, { path: { name: name(v) }, key: keyOf(v) }, common)).body;
    },
    ...begins,
  };
}

/** Imports a file of the host. */
export function importFile(stores: string[], details?: ImageDetails): Act {
  return importAct(stores, details, {
    verb: "Import",
    consequences: ["The file is copied into a store of the host, and can be removed afterwards."],
    from: {
      key: "from",
      label: "File",
      isRequired: true,
      placeholder: "/path/to/disk.img",
      hint: "On the host of the daemon.",
      check: (from) => (from.startsWith("/") ? null : "It is an absolute path."),
    },
    words: (v) => [or(v.from, "FILE")],
    send: (v, request, common) =>
      api.post("/v1/images/{name}/versions", { ...request, body: { path: v.from ?? "", ...common } }),
  });
}

/** Whether an address may stand in a command: one with a password, or with a key behind a `?`, is not repeated. */
const shownAddress = (url: string | undefined) =>
  url && downloadReason(url) === null
    ? (url.split("?")[0] ?? url) + (url.includes("?") ? "?QUERY" : "")
    : "URL";

export function downloadReason(url: string): string | null {
  if (!/^(https?|oci):\/\/./.test(url)) return "It begins with https://, http:// or oci://.";
  return url.split("://")[1]?.split("/")[0]?.includes("@")
    ? "An address has no user and password: download the file yourself, and import it."
    : null;
}

/** Downloads an image, and imports it. */
export function downloadImage(stores: string[], details?: ImageDetails): Act {
  return importAct(stores, details, {
    verb: "Download",
    consequences: [
      "The daemon downloads it, and only from hosts that its option --import-from names.",
      "Meanwhile the store needs space for the file and for the disk.",
    ],
    from: {
      key: "url",
      label: "Address",
      isRequired: true,
      placeholder: "https://, http:// or oci://",
      hint: "A file that ends in .gz or .zst is unpacked.",
      check: downloadReason,
    },
    more: [
      {
        key: "sha256",
        label: "SHA-256 of the file",
        hint: "Compared while it is downloaded. For oci://, put @sha256: into the address.",
        check: (text) => (/^[0-9a-fA-F]{64}$/.test(text) ? null : "It has 64 hexadecimal digits."),
      },
    ],
    words: (v) => [shownAddress(v.url), ...(v.sha256 ? ["--sha256", v.sha256] : [])],
    send: (v, request, common) => {
      const digest = v.sha256 ? { sha256: v.sha256 } : {};
      return api.post("/v1/images/{name}/downloads", {
        ...request,
        body: { url: v.url ?? "", ...digest, ...common },
      });
    },
  });
}

/** Machines whose disks are kept as files, with why one cannot be committed now. */
export async function committable(
  catalogs: Catalog[],
): Promise<{ machine: string; image: string; reason: string | null }[]> {
  const kept = catalogs.filter((c) => hasKeptDisks(c.spec));
  const lists = await Promise.all(
    kept.map((c) => all<Machine>(`/v1/machines?catalog=${encodeURIComponent(c.name)}`)),
  );
  return lists.flatMap((machines, i) =>
    machines.map((m) => ({
      machine: m.name,
      image: kept[i]?.spec.image.split(":")[0] ?? "",
      reason:
        m.power === "off" && m.status.phase === "stopped" ? null : `${m.name} is not off: stop it first.`,
    })),
  );
}

/** Makes a version of the disk of a machine. */
export function commitMachine(image: string, machines: { machine: string; reason: string | null }[]): Act {
  const keyOf = keysByContent();
  const reasonOf = (name: string) => machines.find((m) => m.machine === name)?.reason ?? null;
  return {
    title: `Make a version of ${image} from a machine's disk`,
    consequences: [
      "The version is the machine's image with what the machine has written over it.",
      "Identities and secrets on the disk would be in each clone: check the version before it is published.",
      "The machine cannot be started or deleted meanwhile. It keeps its disk, and the version that it has.",
    ],
    verb: "Make the version",
    fields: [
      {
        key: "machine",
        label: "Machine",
        isRequired: true,
        options: [
          ["", "choose a machine"],
          ...machines.map(({ machine, reason }): [string, string] => [
            machine,
            reason ? `${machine} (not off)` : machine,
          ]),
        ],
        check: reasonOf,
      },
      {
        key: "publish",
        label: "When it is ready",
        options: [
          ["", "do not publish it"],
          ["yes", "publish it"],
        ],
      },
    ],
    command: (v) =>
      line(
        "spillway",
        "image",
        "commit",
        or(v.machine, "MACHINE"),
        "--name",
        image,
        v.publish === "yes" && "--publish",
      ),
    run: async (v) => {
      const body = { machine: v.machine ?? "", ...(v.publish === "yes" ? { publish: true } : {}) };
      return (await api.post("/v1/images/{name}/commits", { path: { name: image }, key: keyOf(v), body })).body;
    },
    ...begins,
  };
}
