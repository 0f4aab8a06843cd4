// What an act would be as a command, a file or a request: the same words, so that what was tried here can be scripted.
//
// Invariant: a setting that is absent is absent in each of them; no default is written out.
import type { CatalogSpec } from "./api/client.ts";
import { sizeText } from "./ui/format.ts";

const SOCKET = "/run/spillway/spillwayd.sock";

/** A word as a shell takes it. */
export function quote(word: string): string {
  return /^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", `'\\''`)}'`;
}

export function line(...words: (string | undefined | false)[]): string {
  return words
    .filter((w): w is string => typeof w === "string" && w !== "")
    .map(quote)
    .join(" ");
}

/** The option of each setting, in the order of `spillway catalog create --help`. */
const OPTIONS: Record<string, string> = {
  image: "--image",
  residency: "--residency",
  count: "--count",
  type: "--type",
  mode: "--mode",
  ram_bytes: "--ram",
  overflow_bytes: "--overflow",
  full: "--full",
  warn_at: "--warn-at",
  critical_at: "--critical-at",
  iops: "--iops",
  iops_burst: "--iops-burst",
  bandwidth_bytes: "--bandwidth",
  bandwidth_burst_bytes: "--bandwidth-burst",
  base_cache: "--base-cache",
  ram_guarantee_bytes: "--ram-guarantee",
  overflow_store: "--overflow-store",
  verify_reads: "--verify-reads",
  data_disk_bytes: "--data-disk",
  data_disk_store: "--data-disk-store",
  scratch_disk_bytes: "--scratch-disk",
  scratch_format: "--scratch-format",
  vcpus: "--vcpus",
  memory_bytes: "--memory",
  vmm: "--vmm",
  socket_group: "--socket-group",
  sockets: "--sockets",
  hugepages: "--hugepages",
  cpu_model: "--cpu",
  machine_type: "--machine-type",
  guest: "--guest",
  firmware: "--firmware",
  tpm: "--tpm",
  network: "--network",
  more_networks: "--network",
  display: "--display",
  video: "--video",
  watchdog: "--watchdog",
  naming: "--naming",
  reset: "--reset",
  ready: "--ready",
  grace_seconds: "--grace",
  warm: "--warm",
  claim_ttl_seconds: "--claim-ttl",
  autostart: "--autostart",
  start_order: "--start-order",
  start_delay_seconds: "--start-delay",
  user_data: "--user-data",
  authorized_keys: "--authorized-keys",
  kernel: "--kernel",
  initrd: "--initrd",
  append: "--append",
  extra_args: "--extra-arg",
  labels: "--label",
};

/** A time as options take it. */
export function ttlText(seconds: number): string {
  if (seconds === 0) return "none";
  for (const [unit, length] of [
    ["d", 86_400],
    ["h", 3600],
    ["m", 60],
  ] as const) {
    if (seconds % length === 0) return `${seconds / length}${unit}`;
  }
  return `${seconds}s`;
}

/** Reads a time such as `30m`, `8h` or `none`, in seconds; null if it is none. */
export function parseTtl(text: string): number | null {
  if (text === "none") return 0;
  const match = text.match(/^([1-9]\d*)([smhd])$/);
  if (!match) return null;
  return Number(match[1]) * { s: 1, m: 60, h: 3600, d: 86_400 }[match[2] as "s" | "m" | "h" | "d"];
}

function optionValue(key: string, value: unknown): string {
  if (key.endsWith("_bytes") && typeof value === "number") return sizeText(value);
  if (key === "claim_ttl_seconds") return ttlText(Number(value));
  if (key === "network" || key === "more_networks") return networkText(value);
  return String(value);
}

/** A network as options and fields take it. */
export function networkText(network: unknown): string {
  return typeof network === "object" && network ? `bridge=${(network as { bridge: string }).bridge}` : String(network);
}

type Draft = Partial<CatalogSpec>;

function given(spec: Draft): [string, unknown][] {
  return Object.keys(OPTIONS)
    .map((key): [string, unknown] => [key, (spec as Record<string, unknown>)[key]])
    .filter(([, value]) => value !== undefined && value !== null && !isEmpty(value));
}

function isEmpty(value: unknown): boolean {
  return typeof value === "object" && value !== null && Object.keys(value).length === 0;
}

/** `spillway catalog create …`. Texts become files, whose names are placeholders. */
export function createCommand(name: string, spec: Draft): string {
  const parts = [`spillway catalog create ${quote(name || "NAME")}`];
  for (const [key, value] of given(spec)) {
    const option = OPTIONS[key] as string;
    if (typeof value === "boolean") {
      if (value) parts.push(option);
    } else if (key === "labels") {
      for (const [k, v] of Object.entries(value as Record<string, string>))
        parts.push(line(option, `${k}=${v}`));
    } else if (key === "user_data") parts.push(`${option} user-data.txt`);
    else if (key === "authorized_keys") {
      if ((value as string[]).length) parts.push(`${option} keys.txt`);
    } else if (Array.isArray(value)) {
      for (const one of value) parts.push(line(option, optionValue(key, one)));
    } else parts.push(line(option, optionValue(key, value)));
  }
  return parts.join(" \\\n    ");
}

function tomlValue(value: unknown): string {
  if (Array.isArray(value)) return `[${value.map(tomlValue).join(", ")}]`;
  if (typeof value === "object" && value) {
    return `{ ${Object.entries(value)
      .map(([k, v]) => `${/^[\w-]+$/.test(k) ? k : JSON.stringify(k)} = ${tomlValue(v)}`)
      .join(", ")} }`;
  }
  return JSON.stringify(value);
}

/** A setting as a line of a catalog's file. */
function tomlLine(key: string, value: unknown): string {
  const isSize = key.endsWith("_bytes") && typeof value === "number";
  return `${key} = ${isSize ? JSON.stringify(sizeText(value)) : tomlValue(value)}`;
}

/** The catalog as a file for `spillway catalog apply`. */
export function toml(name: string, spec: Draft): string {
  const lines = given(spec).map(([key, value]) => tomlLine(key, value));
  return [`[catalogs.${name || "NAME"}]`, ...lines].join("\n");
}

/** A request by curl at the unix socket. */
export function curl(
  method: string,
  path: string,
  body?: unknown,
  headers: Record<string, string> = {},
): string {
  const parts = [`curl --unix-socket ${SOCKET}`];
  if (method !== "GET" && !(method === "POST" && body !== undefined)) parts.push(`-X ${method}`);
  for (const [key, value] of Object.entries(headers)) parts.push(line("-H", `${key}: ${value}`));
  if (body !== undefined) {
    parts.push("-H 'Content-Type: application/json'");
    parts.push(`-d ${quote(JSON.stringify(body))}`);
  }
  parts.push(quote(`http://localhost${path}`));
  return parts.join(" \\\n    ");
}

/** Changes settings of a catalog by its file: what is in the file and not changed stays. */
export function changeCommand(name: string, changes: Record<string, unknown>): string {
  const keys = Object.keys(changes);
  if (keys.length === 1 && typeof changes.count === "number") {
    return line("spillway", "catalog", "scale", name, String(changes.count));
  }
  const edits = Object.entries(changes)
    .map(([key, value]) => {
      if (value === undefined || value === null) return `#   remove the line of ${key}`;
      return `#   ${tomlLine(key, value)}`;
    })
    .join("\n");
  return `spillway catalog export ${quote(name)} >catalog.toml\n# Edit catalog.toml before it is applied:\n${edits}\nspillway catalog apply -f catalog.toml`;
}

/** The names of machines, from a pattern such as `desk-###`. */
export function machineNames(pattern: string, count: number): string[] {
  const run = pattern.match(/#+/);
  if (!run) return [];
  const one = (n: number) => pattern.replace(run[0], String(n).padStart(run[0].length, "0"));
  if (count <= 4) return Array.from({ length: count }, (_, i) => one(i + 1));
  return [one(1), one(2), one(3), one(count)];
}
