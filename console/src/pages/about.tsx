// Versions, and what the console is made of.
import type { Host } from "../api/client.ts";
import { useObject } from "../state/resource.ts";
import { session } from "../state/session.ts";
import { duration } from "../ui/format.ts";
import { Facts, PageHead, Panel, Pending } from "../ui/parts.tsx";

export function AboutPage() {
  const host = useObject<Host>("/v1/host");
  const state = session.value;
  return (
    <>
      <PageHead title="About" />
      <Panel title="This host">
        {host.data ? (
          <Facts
            items={[
              ["spillwayd", host.data.version],
              ["Hypervisor", host.data.hypervisor],
              ["Users of guests", host.data.guest_users ?? "the daemon's"],
            ]}
          />
        ) : (
          <Pending error={host.error} what="the host" />
        )}
      </Panel>
      {state.is === "in" && state.session.caller ? (
        <Panel title="You">
          <Facts
            items={[
              ["Caller", state.session.caller],
              ["Role", state.session.role],
              ["Signed in with", state.session.by],
              [
                "Session ends in",
                state.session.seconds_left === null ? "never" : duration(state.session.seconds_left),
              ],
            ]}
          />
        </Panel>
      ) : null}
      <Panel title="The console">
        <p>
          Everything here is a request that anybody with the same role can send: the console has no interface
          of its own. It loads nothing from other servers. The browser keeps the choice of colours, and the
          cookie of the session.
        </p>
        <p>
          Spillway is under the MIT or the Apache 2.0 licence.{" "}
          <a href="licences.txt">Licences of the packages in the console</a>
        </p>
      </Panel>
    </>
  );
}
