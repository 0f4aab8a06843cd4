// Acts on stores and registries.
//
// Invariant: credentials are the path of a file on the daemon's host. An address with a password is neither sent nor shown.
import { api, type Schemas } from "./api/client.ts";
import { line } from "./commands.ts";
import { begins, nameReason, or } from "./image-acts.ts";
import { addressReason, type Registry } from "./image-words.ts";
import { navigate } from "./router.ts";
import type { Act, Values } from "./ui/dialog.tsx";

const CLASSES: [string, string][] = [
  ["", "choose what it is for"],
  ["shared", "shared: images"],
  ["local", "local: images, overflow, kept disks"],
  ["cache", "cache: private copies of mode ephemeral"],
  ["temp", "temp: scratch disks, private copies"],
];

const absolute = (text: string) => (text.startsWith("/") ? null : "It is an absolute path.");

export function addStore(): Act {
  return {
    title: "Add a store",
    consequences: [
      "The folder is created if it is not there, and must be empty. From then on it is the daemon's alone.",
      "A store cannot be removed again by the daemon, and its class stays.",
      "Mount its file system first: what is put into an empty mount point is hidden by the mount.",
    ],
    verb: "Add",
    fields: [
      { key: "name", label: "Name", isRequired: true, check: nameReason },
      { key: "path", label: "Folder", isRequired: true, placeholder: "/srv/spillway", check: absolute },
      { key: "class", label: "Class", isRequired: true, options: CLASSES },
    ],
    command: (v) =>
      line(
        "spillway",
        "store",
        "add",
        or(v.name, "NAME"),
        or(v.path, "PATH"),
        "--class",
        or(v.class, "CLASS"),
      ),
    run: (v) =>
      api.post("/v1/stores", {
        body: { name: v.name ?? "", path: v.path ?? "", class: v.class as Schemas["StoreClass"] },
      }),
    done: "The store is added.",
  };
}

function registryOf(v: Values): Registry {
  return {
    name: v.name ?? "",
    url: v.url ?? "",
    ...(v.endpoint ? { endpoint: v.endpoint } : {}),
    ...(v.region ? { region: v.region } : {}),
    ...(v.credentials ? { credentials: v.credentials } : {}),
    ...(v.key ? { require_signature: [v.key] } : {}),
    ...(v.single === "yes" ? { single_writer: true } : {}),
  };
}

/** An address in a command: what may have a password in it is not repeated. */
const shown = (url: string | undefined, isEndpoint = false) =>
  url && addressReason(url, isEndpoint) === null ? url : "URL";

export function addRegistry(): Act {
  return {
    title: "Add a registry",
    consequences: [
      "Address and credentials are tried first. An empty folder or bucket becomes a registry.",
      "Its settings cannot be changed afterwards, except for the content of the file of credentials.",
      "A folder on another server must be mounted first: an empty mount point would become a registry.",
    ],
    verb: "Add",
    fields: [
      { key: "name", label: "Name", isRequired: true, placeholder: "hub", check: nameReason },
      {
        key: "url",
        label: "Address",
        isRequired: true,
        placeholder: "s3://BUCKET/PREFIX",
        hint: "Or file:///FOLDER, https://HOST/PATH. It has no user and password.",
        check: (url) => addressReason(url),
      },
      {
        key: "credentials",
        label: "File of credentials",
        placeholder: "/etc/spillway/hub",
        hint: "For s3, on the host of the daemon. Its content is never shown.",
        check: absolute,
      },
      {
        key: "endpoint",
        label: "Endpoint",
        placeholder: "that of AWS",
        hint: "For s3.",
        check: (url) => addressReason(url, true),
      },
      { key: "region", label: "Region", placeholder: "us-east-1", hint: "For s3." },
      {
        key: "key",
        label: "Required signature",
        placeholder: "none",
        hint: "The public key of minisign that must have signed each version.",
      },
      {
        key: "single",
        label: "Who pushes to it",
        options: [
          ["", "several hosts may"],
          ["yes", "this host alone (S3 without conditional writes)"],
        ],
      },
    ],
    command: (v) =>
      line(
        "spillway",
        "registry",
        "add",
        or(v.name, "NAME"),
        shown(v.url),
        ...(v.endpoint ? ["--endpoint", shown(v.endpoint, true)] : []),
        ...(v.region ? ["--region", v.region] : []),
        ...(v.credentials ? ["--credentials", absolute(v.credentials) ? "FILE" : v.credentials] : []),
        ...(v.key ? ["--require-signature", v.key] : []),
        v.single === "yes" && "--single-writer",
      ),
    run: (v) => api.post("/v1/registries", { body: registryOf(v) }),
    done: "The registry is added.",
  };
}

export function removeRegistry(name: string): Act {
  return {
    title: `Remove ${name} from this host?`,
    consequences: [
      "The host forgets the address. What is in the registry stays, also for other hosts.",
      "Versions that were copied from it stay here.",
      "The daemon refuses this while a version is streamed from it.",
    ],
    verb: "Remove",
    isDestructive: true,
    command: line("spillway", "registry", "remove", name),
    run: () => api.delete("/v1/registries/{name}", { path: { name } }),
    done: `${name} is removed from this host.`,
  };
}

/** Deletes a version in a registry, of which nobody knows who streams it. */
export function deleteInRegistry(registry: string, image: string, after: () => void): Act {
  const [name = "", version = ""] = image.split(":");
  return {
    title: `Delete ${image} in ${registry}?`,
    consequences: [
      "The name of the version is gone there, for all hosts. No host can pull it any more.",
      "Reads of hosts that stream it may fail after the next collection of garbage. The registry does not know which hosts do.",
      "Copies on hosts stay. Its chunks stay in the registry until a collection of garbage.",
    ],
    verb: "Delete there",
    isDestructive: true,
    typed: `${registry}/${image}`,
    command: line("spillway", "registry", "delete", `${registry}/${image}`),
    run: () =>
      api.delete("/v1/registries/{name}/images/{image}/{version}", {
        path: { name: registry, image: name, version: Number(version) },
      }),
    done: `${image} is deleted in ${registry}.`,
    after,
  };
}

/** Counts the garbage of a registry, or records and deletes it. */
export function collectGarbage(name: string, isDeleting: boolean): Act {
  return {
    title: isDeleting ? `Collect the garbage in ${name}?` : `Count the garbage in ${name}?`,
    consequences: isDeleting
      ? [
          "What no version in the registry needs for 7 days is recorded. What a collection recorded at least a day ago, and is garbage still, is deleted there.",
          "Versions and pushes in progress keep what they need.",
          "Run it from one host. Versions that were deleted there, and are streamed by a host, may lose chunks.",
        ]
      : ["The registry is read. Nothing in it is changed."],
    verb: isDeleting ? "Collect" : "Count",
    isDestructive: isDeleting,
    command: line("spillway", "registry", "gc", name, isDeleting && "--delete"),
    run: async () =>
      (
        await api.post("/v1/registries/{name}/collections", {
          path: { name },
          body: isDeleting ? { delete: true } : {},
        })
      ).body,
    done: begins.done,
    after: () => navigate(["operations"]),
  };
}
