// Whether who looks at this page may use a console. A socket that is refused says no reason, so it is asked before.
import { adviceOf, transport } from "../transport.ts";

/** Null: yes. Otherwise why not. */
export async function session(what: "console" | "screen"): Promise<string | null> {
  try {
    const { status, body } = await transport.request({ method: "GET", path: "/v1/session" });
    if (status === 401) return "You are not logged in: open the console of this host first.";
    const role = body && typeof body === "object" && "role" in body ? body.role : undefined;
    if (role === "operate" || role === "admin") return null;
    return `The ${what} of a machine needs the role operate, and your token has the role ${String(role)}.`;
  } catch (error) {
    return adviceOf(error) ?? "spillwayd does not answer. Load the page again when it does.";
  }
}
