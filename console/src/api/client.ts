// Typed requests to the daemon. The types come from the API's description (schema.d.ts), and nothing is checked at run
// time beyond the status.
//
// Invariant: a request that the daemon refused is an ApiError with the daemon's own words; one that did not reach it, or was not
// answered in time or not by spillwayd, is an Unreachable. Each GET ends.
import { through } from "../shown-host.ts";
import { adviceOf, transport } from "../transport.ts";
import type { components, paths } from "./schema";

export type Schemas = components["schemas"];
export type Problem = Schemas["Problem"];
export type Catalog = Schemas["Catalog"];
export type CatalogSpec = Schemas["CatalogSpec"];
export type Machine = Schemas["MachineDetails"];
export type Host = Schemas["HostDetails"];
export type Store = Schemas["StoreDetails"];
export type Image = Schemas["Image"];
export type ImageDetails = Schemas["ImageDetails"];
export type ImageCheck = Schemas["ImageCheck"];
export type Event = Schemas["Event"];
export type Figures = Schemas["Figures"];
export type Curve = Schemas["DiskCurve"];
export type Operation = Schemas["Operation"];
export type Levels = Schemas["DiskLevels"];
export type Counters = Schemas["DiskCounters"];

type Method = "get" | "post" | "put" | "delete";
/** Paths that have a method. */
type PathsOf<M extends Method> = {
  [P in keyof paths]: paths[P] extends Record<M, object> ? P : never;
}[keyof paths];
type Operations<P extends keyof paths, M extends Method> = M extends keyof paths[P] ? paths[P][M] : never;
type Json<T> = T extends { content: { "application/json": infer B } } ? B : never;
type Result<O> = O extends { responses: { 200: infer R } } ? Json<R> : never;
type Body<O> = O extends { requestBody: infer B } ? Json<B> : undefined;
type Query<O> = O extends { parameters: { query?: infer Q } } ? Q : undefined;
type PathOf<O> = O extends { parameters: { path: infer P } } ? P : undefined;

export interface Options<O> {
  path?: PathOf<O>;
  query?: Query<O> & Record<string, string | number | boolean | null | undefined>;
  body?: Body<O>;
  /** ETag that the object must still have. */
  ifMatch?: string | undefined;
  /** Idempotency-Key: the request sent again with it does nothing more. */
  key?: string;
  signal?: AbortSignal | undefined;
}

export class ApiError extends Error {
  constructor(readonly problem: Problem) {
    super(problem.detail || problem.title);
  }
  get code(): string {
    return this.problem.code;
  }
}

export class Unreachable extends Error {}

/**
 * What is called when the daemon refuses the caller (401 or 403), when it cannot be reached (with what to do, if that is known), and when
 * it answers.
 */
export const hooks = { refused: () => {}, unreachable: (_advice: string | null) => {}, answered: () => {} };

/** How long a GET may take. The daemon itself ends the check of an image after 50 seconds. */
const GET_MS = 20_000;
const CHECK_MS = 60_000;

/** The signal of a request: the caller's, and for a GET its deadline. */
function limited(method: string, path: string, signal: AbortSignal | undefined): AbortSignal | undefined {
  if (method !== "GET") return signal;
  const deadline = AbortSignal.timeout(/\/check(\?|$)/.test(path) ? CHECK_MS : GET_MS);
  return signal ? AbortSignal.any([signal, deadline]) : deadline;
}

/** A path with its parameters and query filled in. */
export function address(
  template: string,
  path?: Record<string, unknown> | undefined,
  query?: Record<string, unknown> | undefined,
): string {
  const filled = template.replace(/\{(\w+)\}/g, (_, key: string) =>
    encodeURIComponent(String(path?.[key] ?? "")),
  );
  const pairs = Object.entries(query ?? {})
    .filter(([, value]) => value !== undefined && value !== null)
    .map(([key, value]) => `${encodeURIComponent(key)}=${encodeURIComponent(String(value))}`);
  return pairs.length ? `${filled}?${pairs.join("&")}` : filled;
}

export interface Answer<T> {
  status: number;
  etag: string | null;
  body: T;
}

const NO_ANSWER = "The daemon does not answer.";
const LATE = "The daemon has not answered in time.";
/** When the daemon answered a request last, in milliseconds of `performance.now()`. */
let answeredAt = Number.NEGATIVE_INFINITY;

function noAnswer(why: string, advice: string | null = null): Unreachable {
  hooks.unreachable(advice);
  return new Unreachable(advice ?? why);
}

/** A request was late. If the daemon has answered another one meanwhile, it is there, and only slow with this one. */
function late(began: number): Unreachable {
  if (answeredAt <= began) hooks.unreachable(null);
  return new Unreachable(LATE);
}

/** Sends a request whose path is known only at run time, so that the description cannot say its types. */
export async function raw<T>(
  method: "GET" | "POST" | "PUT" | "DELETE",
  path: string,
  options: { body?: unknown; headers?: Record<string, string>; signal?: AbortSignal | undefined } = {},
): Promise<Answer<T>> {
  let reply: Awaited<ReturnType<typeof transport.request>>;
  const began = performance.now();
  try {
    const signal = limited(method, path, options.signal);
    reply = await transport.request({ method, path: through(path), ...options, signal });
  } catch (error) {
    if (options.signal?.aborted) throw error;
    if (error instanceof DOMException && error.name === "TimeoutError") throw late(began);
    throw noAnswer(NO_ANSWER, adviceOf(error));
  }
  // A relay in front of the daemon says so by these.
  if (reply.status === 502 || reply.status === 504) throw noAnswer(NO_ANSWER);
  if (reply.status === 200 && reply.body === undefined) throw noAnswer("The answer is not of spillwayd.");
  answeredAt = performance.now();
  hooks.answered();
  if (reply.status === 401 || reply.status === 403) hooks.refused();
  if (reply.status >= 400) {
    const problem = (reply.body ?? {}) as Partial<Problem>;
    throw new ApiError({
      type: problem.type ?? "about:blank",
      title: problem.title ?? `Status ${reply.status}`,
      status: reply.status,
      detail: problem.detail ?? `The daemon answered with status ${reply.status}.`,
      code: problem.code ?? "internal",
    });
  }
  return { status: reply.status, etag: reply.etag, body: reply.body as T };
}

async function send<P extends keyof paths, M extends Method>(
  method: M,
  template: P,
  options: Options<Operations<P, M>> = {},
): Promise<Answer<Result<Operations<P, M>>>> {
  const path = address(
    template,
    options.path as Record<string, unknown> | undefined,
    options.query as Record<string, unknown> | undefined,
  );
  const headers: Record<string, string> = {};
  if (options.ifMatch) headers["If-Match"] = options.ifMatch;
  if (options.key) headers["Idempotency-Key"] = options.key;
  const verb = method.toUpperCase() as "GET" | "POST" | "PUT" | "DELETE";
  return raw(verb, path, { body: options.body, headers, signal: options.signal });
}

export const api = {
  get: <P extends PathsOf<"get">>(path: P, options?: Options<Operations<P, "get">>) =>
    send("get", path, options),
  post: <P extends PathsOf<"post">>(path: P, options?: Options<Operations<P, "post">>) =>
    send("post", path, options),
  put: <P extends PathsOf<"put">>(path: P, options?: Options<Operations<P, "put">>) =>
    send("put", path, options),
  delete: <P extends PathsOf<"delete">>(path: P, options?: Options<Operations<P, "delete">>) =>
    send("delete", path, options),
};

/** A key for one act of one person, however often it is sent. */
/** Keys of a request that may be sent again: the same for the same content, and another one for what was changed since. */
export function keysByContent(): (content: unknown) => string {
  let sent = { text: "", key: "" };
  return (content) => {
    const text = JSON.stringify(content);
    if (sent.text !== text) sent = { text, key: newKey() };
    return sent.key;
  };
}

export function newKey(): string {
  return [...crypto.getRandomValues(new Uint8Array(16))].map((b) => b.toString(16).padStart(2, "0")).join("");
}

/** All pages of a list. */
export async function all<T>(path: string, signal?: AbortSignal): Promise<T[]> {
  const items: T[] = [];
  const join = path.includes("?") ? "&" : "?";
  let next: string | null | undefined;
  do {
    const more: string = next ? `&continue=${encodeURIComponent(next)}` : "";
    const page = await raw<{ items: T[]; next?: string | null }>("GET", `${path}${join}limit=1000${more}`, {
      signal,
    });
    items.push(...page.body.items);
    next = page.body.next;
  } while (next);
  return items;
}

/** An error in words for people. */
export function words(error: unknown): string {
  return error instanceof Error ? error.message : String(error);
}
