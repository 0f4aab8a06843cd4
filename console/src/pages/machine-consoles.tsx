// The serial console and the screen of a machine: documents of their own in a frame, as their libraries need another policy
// and are loaded only when somebody opens one.
//
// Invariant: a connection ends with its tab.
import { href } from "../router.ts";
import { can } from "../state/session.ts";
import { Notice } from "../ui/parts.tsx";

const NO_ROLE = "The keyboard and the screen of a machine need the role operate.";

export function ConsoleTab({ name, kind }: { name: string; kind: "serial" | "screen" }) {
  if (!can("operate")) return <Notice>{NO_ROLE}</Notice>;
  const address = `${kind}.html${href(["machines", name])}`;
  return (
    <>
      <iframe
        class="console"
        title={kind === "serial" ? `Serial console of ${name}` : `Screen of ${name}`}
        src={address}
        allow="fullscreen"
      />
      <p class="hint">
        <a href={address} target="_blank" rel="noopener">
          Open it in a window of its own
        </a>
      </p>
    </>
  );
}
