//! The table of identities: the file, what in it is a finding, what to do. docs/image-check.md is generated from it.
//!
//! Invariant: a row names one folder and a pattern for file names, so that checking it costs one listing of the folder.

use super::{IdentityCondition, IdentityRule};
use spillway_api::{FindingKind, Severity};

const ERROR: Severity = Severity::Error;
const WARNING: Severity = Severity::Warning;
const NOTE: Severity = Severity::Note;

const SECRET: &str = "what one clone keeps secret with it, every other can read";
const RANDOM: &str = "clones begin with the same randomness, and their keys may be alike";
const LEASES: &str = "clones ask the DHCP server under one name and are given one address";
const AGENT: &str = "clones are one machine to its server, and take each other's place there";
const NAMED: &str = "what all clones report is filed under one name";
const MEMBER: &str =
    "clones are one member to the others: the second is refused, or takes the first one's place";
const PEER: &str = "clones are one node to the network: it reaches now the one and now the other";
const PASSES: &str = "whoever has the image can pass for every clone";
const LICENSE: &str = "clones are one system to its vendor, and take each other's place there";
const BOUND: &str = "it names devices by what a clone's devices do not have";

const REMOVE: &str = "remove it before the image is made; it is made anew";
const ENROL: &str = "remove it, and let cloud-init enrol the machine when it first starts";
const JOIN: &str = "remove it, and let cloud-init join the cluster when a machine first starts";
const UNSET: &str = "take the setting out: the host name is used then";
const GIVE: &str = "remove it, and let cloud-init write one for each machine";

const fn row(
    kind: FindingKind,
    severity: Severity,
    (folder, name): (&'static str, &'static str),
    when: IdentityCondition,
    what: &'static str,
    why: &'static str,
    remedy: &'static str,
) -> IdentityRule {
    IdentityRule { folder, name, when, kind, severity, what, why, remedy }
}

/// Rule for a file that identifies an agent.
const fn agent(
    folder: &'static str,
    name: &'static str,
    what: &'static str,
    why: &'static str,
    remedy: &'static str,
) -> IdentityRule {
    row(FindingKind::AgentIdentity, ERROR, (folder, name), IdentityCondition::NotEmpty, what, why, remedy)
}

/// Rule for a setting that identifies an agent.
const fn setting(
    severity: Severity,
    (folder, name, setting): (&'static str, &'static str, &'static str),
    what: &'static str,
    why: &'static str,
    remedy: &'static str,
) -> IdentityRule {
    row(
        FindingKind::AgentIdentity,
        severity,
        (folder, name),
        IdentityCondition::Set(setting),
        what,
        why,
        remedy,
    )
}

/// Rule for a key that clones would share.
const fn secret(
    folder: &'static str,
    name: &'static str,
    what: &'static str,
    why: &'static str,
    remedy: &'static str,
) -> IdentityRule {
    row(FindingKind::SharedSecret, WARNING, (folder, name), IdentityCondition::NotEmpty, what, why, remedy)
}

const fn lease(
    folder: &'static str,
    name: &'static str,
    what: &'static str,
    remedy: &'static str,
) -> IdentityRule {
    row(FindingKind::DhcpIdentity, WARNING, (folder, name), IdentityCondition::NotEmpty, what, LEASES, remedy)
}

/// The rules, in the order of the page.
pub const GROUPS: &[(&str, &[IdentityRule])] = &[
    ("The operating system", SYSTEM),
    ("DHCP clients", DHCP),
    ("Storage and network cards", DEVICES),
    ("Directories and subscriptions", DOMAINS),
    ("Clouds", CLOUDS),
    ("Configuration management", MANAGEMENT),
    ("Monitoring", MONITORING),
    ("Security agents", SECURITY),
    ("VPN and overlay networks", NETWORKS),
    ("Containers and clusters", CLUSTERS),
    ("Databases and queues", DATABASES),
    ("Build agents, backup and others", OTHERS),
];

#[rustfmt::skip]
const SYSTEM: &[IdentityRule] = &[
    row(FindingKind::MachineId, ERROR, ("/etc", "machine-id"), IdentityCondition::Initialized, "the machine-id of systemd",
        "clones share it: DHCP servers give them one address, and logs take them for one machine",
        "truncate -s 0 /etc/machine-id && rm -f /var/lib/dbus/machine-id"),
    row(FindingKind::MachineId, ERROR, ("/var/lib/dbus", "machine-id"), IdentityCondition::Initialized, "the machine-id of D-Bus",
        "systemd takes it when its own is empty, and clones share it", "rm -f /var/lib/dbus/machine-id"),
    row(FindingKind::SshHostKeys, ERROR, ("/etc/ssh", "ssh_host_*_key"), IdentityCondition::NotEmpty, "SSH host keys",
        "whoever has the image can pass for every clone; cloud-init replaces them only where it runs",
        "rm /etc/ssh/ssh_host_*"),
    row(FindingKind::SshHostKeys, ERROR, ("/etc/dropbear", "dropbear_*_host_key"), IdentityCondition::NotEmpty, "SSH host keys of Dropbear",
        PASSES, "rm /etc/dropbear/dropbear_*_host_key; dropbear -R makes them anew"),
    secret("/var/lib/systemd", "random-seed", "the random seed of systemd", RANDOM, "rm /var/lib/systemd/random-seed"),
    secret("/var/lib/urandom", "random-seed", "the random seed of sysvinit", RANDOM, "rm /var/lib/urandom/random-seed"),
    secret("/var/lib/misc", "random-seed", "the random seed of OpenRC", RANDOM, "rm /var/lib/misc/random-seed"),
    secret("/var/lib/seedrng", "seed.*", "the random seed of seedrng", RANDOM, "rm /var/lib/seedrng/seed.*"),
    secret("/boot/loader", "random-seed", "the random seed of systemd-boot", RANDOM, "rm /boot/loader/random-seed"),
    secret("/var/lib/systemd", "credential.secret", "the key that systemd seals credentials with", SECRET,
        "rm /var/lib/systemd/credential.secret"),
    secret("/var/lib/systemd/home", "local.private", "the key of systemd-homed", SECRET, "rm /var/lib/systemd/home/local.*"),
    secret("/root/.ssh", "id_rsa|id_ecdsa|id_ed25519|id_dsa", "an SSH key of root", SECRET, GIVE),
    secret("/root/.gnupg/private-keys-v1.d", "*.key", "a GnuPG key of root", SECRET, GIVE),
    secret("/etc/ssl/private", "ssl-cert-snakeoil.key", "the self-signed TLS key of ssl-cert", PASSES,
        "remove it; make-ssl-cert generate-default-snakeoil makes one for each machine"),
    secret("/etc/pki/tls/private", "localhost.key", "the self-signed TLS key of httpd", PASSES, REMOVE),
    secret("/etc/bind", "rndc.key", "the control key of BIND", SECRET, "remove it; rndc-confgen -a makes one for each machine"),
    secret("/etc/unbound", "unbound_server.key|unbound_control.key", "the control keys of Unbound", SECRET,
        "remove them; unbound-control-setup makes them for each machine"),
    row(FindingKind::AgentIdentity, NOTE, ("/etc", "popularity-contest.conf"), IdentityCondition::Set("MY_HOSTID"),
        "the host id of popularity-contest", "clones are counted as one", "remove the line"),
    row(FindingKind::AgentIdentity, WARNING, ("/etc", "hostid"), IdentityCondition::NotEmpty, "the hostid(3) of the machine",
        "ZFS takes clones for one host and may import one pool twice", "rm /etc/hostid"),
];

#[rustfmt::skip]
const DHCP: &[IdentityRule] = &[
    lease("/var/lib/dhcp", "*lease*", "leases of dhclient", REMOVE),
    lease("/var/lib/dhclient", "*lease*", "leases of dhclient", REMOVE),
    lease("/var/lib/NetworkManager", "*.lease", "leases of NetworkManager", REMOVE),
    secret("/var/lib/NetworkManager", "secret_key", "the key of NetworkManager",
        "clones on one network make the same stable addresses of it", "rm /var/lib/NetworkManager/secret_key"),
    lease("/var/lib/dhcpcd", "duid|secret|*.lease|*.lease6", "identity and leases of dhcpcd", REMOVE),
    lease("/var/lib/dhcpcd5", "duid|secret|*.lease|*.lease6", "identity and leases of dhcpcd", REMOVE),
    lease("/etc", "dhcpcd.duid|dhcpcd.secret", "the identity of dhcpcd", REMOVE),
    lease("/var/lib/dhcpv6", "dhcp6c_duid", "the identity of dhcp6c", REMOVE),
    lease("/var/lib/wicked", "duid.xml|iaid.xml|lease-*.xml", "identity and leases of wicked", REMOVE),
    row(FindingKind::DhcpIdentity, WARNING, ("/etc/systemd", "networkd.conf"), IdentityCondition::Set("DUIDRawData"),
        "a DHCP identity in the settings of systemd-networkd", LEASES, "take DUIDRawData= out"),
];

#[rustfmt::skip]
const DEVICES: &[IdentityRule] = &[
    row(FindingKind::NetworkCard, ERROR, ("/etc/udev/rules.d", "*persistent-net.rules"), IdentityCondition::NotEmpty,
        "names of network cards that are bound to their addresses",
        "a clone's card has another address and gets another name, which nothing is set up for",
        "rm /etc/udev/rules.d/*persistent-net.rules"),
    setting(ERROR, ("/etc/iscsi", "initiatorname.iscsi", "InitiatorName"), "the name of the iSCSI initiator",
        "clones log in to a target in each other's place",
        "put GenerateName=yes there instead (Debian), or have it made when a machine first starts"),
    agent("/etc/nvme", "hostnqn|hostid", "the NVMe name of the host",
        "clones take each other's place at an NVMe target", "rm /etc/nvme/hostnqn /etc/nvme/hostid"),
    row(FindingKind::MountedDevice, WARNING, ("/etc/multipath", "wwids"), IdentityCondition::Line("/"), "WWIDs of multipath devices", BOUND,
        "multipath -W, or rm /etc/multipath/wwids"),
    row(FindingKind::MountedDevice, WARNING, ("/etc/multipath", "bindings"), IdentityCondition::Line("mpath"), "names of multipath devices", BOUND,
        "rm /etc/multipath/bindings"),
    row(FindingKind::MountedDevice, WARNING, ("/etc/lvm/devices", "system.devices"), IdentityCondition::Line("IDTYPE=sys_"),
        "the list of LVM's devices, by serial number or WWID", BOUND, "rm /etc/lvm/devices/system.devices"),
    row(FindingKind::MountedDevice, NOTE, ("/etc/mdadm", "mdadm.conf"), IdentityCondition::Line("ARRAY"), "arrays in the settings of mdadm",
        "a clone waits for those that are not in its image", "take out those that are not in the image"),
    row(FindingKind::MountedDevice, NOTE, ("/etc", "mdadm.conf"), IdentityCondition::Line("ARRAY"), "arrays in the settings of mdadm",
        "a clone waits for those that are not in its image", "take out those that are not in the image"),
];

#[rustfmt::skip]
const DOMAINS: &[IdentityRule] = &[
    agent("/etc", "krb5.keytab", "the Kerberos keys of the host", "clones are one host to the domain, and break each other's password",
        "leave the domain before the image is made, and let cloud-init join it"),
    agent("/etc/opt/quest/vas", "host.keytab", "the Kerberos keys of Safeguard (VAS)", "clones are one host to the domain",
        "leave the domain before the image is made, and let cloud-init join it"),
    secret("/var/lib/samba/private", "secrets.tdb", "the SID and machine password of Samba", "clones have one SID, and are one host to the domain",
        "leave the domain, and remove it"),
    agent("/etc/pki/consumer", "cert.pem|key.pem", "the identity of Red Hat Subscription Manager", LICENSE,
        "subscription-manager unregister && subscription-manager clean"),
    agent("/etc/insights-client", "machine-id", "the identity of Red Hat Insights", LICENSE, "insights-client --unregister; remove it"),
    agent("/etc/sysconfig/rhn", "systemid", "the identity of Spacewalk, Uyuni, ULN or CloudLinux", LICENSE, ENROL),
    agent("/etc/zypp/credentials.d", "SCCcredentials", "the identity at SUSE Customer Center", LICENSE, "SUSEConnect --cleanup"),
    agent("/var/lib/ubuntu-advantage/private", "machine-token.json", "the token of Ubuntu Pro", LICENSE, "pro detach"),
    agent("/var/lib/landscape/client", "broker.bpickle|*-broker.bpickle", "the identity of Landscape", LICENSE, ENROL),
    secret("/var/lib/snapd/device/private-keys-v1", "*", "the device key of snapd", "clones are one device to the store",
        "remove snapd's state before the image is made, or seed the snaps at the first start"),
    agent("/etc/sysconfig/kcare", "systemid", "the identity of KernelCare", LICENSE, ENROL),
];

#[rustfmt::skip]
const CLOUDS: &[IdentityRule] = &[
    agent("/var/lib/amazon/ssm", "registration", "the registration of the AWS SSM agent", AGENT, ENROL),
    agent("/var/lib/amazon/ssm/Vault/Store", "RegistrationKey|InstanceFingerprint", "keys of the AWS SSM agent", AGENT, ENROL),
    agent("/var/lib/ecs/data", "agent.db|ecs_agent_data.json", "the state of the Amazon ECS agent", AGENT, ENROL),
    agent("/etc/codedeploy-agent/conf", "codedeploy.onpremises.yml", "the identity of AWS CodeDeploy", AGENT, ENROL),
    secret("/var/lib/waagent", "*.prv|ovf-env.xml", "keys and settings of the Azure Linux agent", SECRET, "waagent -deprovision"),
    agent("/var/opt/azcmagent", "agentconfig.json", "the identity of Azure Arc", AGENT, "azcmagent disconnect"),
    agent("/var/lib/aziot/keyd/keys", "*", "keys of Azure IoT", AGENT, ENROL),
    agent("/var/lib/nova", "compute_id", "the id of an OpenStack compute host", MEMBER, JOIN),
    agent("/var/lib/juju", "nonce.txt", "the identity of a Juju agent", AGENT, ENROL),
    agent("/var/lib/maas", "maas_id", "the identity of a MAAS rack controller", AGENT, ENROL),
];

#[rustfmt::skip]
const MANAGEMENT: &[IdentityRule] = &[
    agent("/etc/puppetlabs/puppet/ssl/private_keys", "*.pem", "the key of a Puppet agent", AGENT, "puppet ssl clean"),
    agent("/etc/puppet/ssl/private_keys", "*.pem", "the key of a Puppet agent", AGENT, "puppet ssl clean"),
    agent("/var/lib/puppet/ssl/private_keys", "*.pem", "the key of a Puppet agent", AGENT, "puppet ssl clean"),
    agent("/etc/chef", "client.pem|chef_guid", "the key and id of a Chef client", AGENT, ENROL),
    agent("/etc/cinc", "client.pem|chef_guid", "the key and id of a Cinc client", AGENT, ENROL),
    agent("/etc/salt", "minion_id", "the id of a Salt minion", AGENT, ENROL),
    agent("/etc/salt/pki/minion", "minion.pem", "the key of a Salt minion", AGENT, ENROL),
    agent("/etc/venv-salt-minion/pki/minion", "minion.pem", "the key of a Salt minion", AGENT, ENROL),
    agent("/var/cfengine/ppkeys", "localhost.priv", "the key of CFEngine", AGENT, ENROL),
    agent("/opt/rudder/etc", "uuid.hive", "the id of a Rudder agent", AGENT, "rudder agent reinit"),
    agent("/var/lib/fusioninventory-agent", "*.dump", "the device id of FusionInventory", AGENT, REMOVE),
    agent("/var/lib/glpi-agent", "*.dump", "the device id of the GLPI agent", AGENT, REMOVE),
    setting(ERROR, ("/opt/Tanium/TaniumClient", "TaniumClient.ini", "ComputerID"), "the id of a Tanium client", AGENT, "take the setting out"),
    setting(ERROR, ("/var/opt/BESClient", "besclient.config", "ComputerID"), "the id of a BigFix client", AGENT, "take the setting out"),
    agent("/opt/jc", "jcagent.conf|client.key", "the identity of a JumpCloud agent", AGENT, ENROL),
    agent("/var/lib/sftd", "device.token", "the identity of Okta Advanced Server Access", AGENT, ENROL),
    agent("/var/lib/mender", "mender-agent.pem", "the key of a Mender client", AGENT, REMOVE),
    agent("/data/mender", "mender-agent.pem", "the key of a Mender client", AGENT, REMOVE),
];

#[rustfmt::skip]
const MONITORING: &[IdentityRule] = &[
    setting(WARNING, ("/etc/zabbix", "zabbix_agentd.conf|zabbix_agent2.conf", "Hostname"), "a host name in the settings of Zabbix", NAMED, UNSET),
    setting(WARNING, ("/etc/telegraf", "telegraf.conf", "hostname"), "a host name in the settings of Telegraf", NAMED, UNSET),
    setting(WARNING, ("/etc/datadog-agent", "datadog.yaml", "hostname"), "a host name in the settings of Datadog", NAMED, UNSET),
    secret("/etc/datadog-agent", "auth_token", "the token of Datadog's processes", SECRET, REMOVE),
    setting(WARNING, ("/etc", "newrelic-infra.yml", "override_hostname"), "a host name in the settings of New Relic", NAMED, UNSET),
    setting(WARNING, ("/etc", "newrelic-infra.yml", "display_name"), "a name in the settings of New Relic", NAMED, UNSET),
    setting(WARNING, ("/etc/collectd", "collectd.conf", "Hostname"), "a host name in the settings of collectd", NAMED, UNSET),
    setting(WARNING, ("/etc", "collectd.conf", "Hostname"), "a host name in the settings of collectd", NAMED, UNSET),
    setting(WARNING, ("/etc/munin", "munin-node.conf", "host_name"), "a host name in the settings of Munin", NAMED, UNSET),
    setting(WARNING, ("/etc/sensu", "agent.yml", "name"), "a name in the settings of Sensu", NAMED, UNSET),
    agent("/var/lib/filebeat", "meta.json", "the id of Filebeat", AGENT, REMOVE),
    agent("/var/lib/metricbeat", "meta.json", "the id of Metricbeat", AGENT, REMOVE),
    agent("/var/lib/auditbeat", "meta.json", "the id of Auditbeat", AGENT, REMOVE),
    agent("/var/lib/packetbeat", "meta.json", "the id of Packetbeat", AGENT, REMOVE),
    agent("/var/lib/heartbeat-elastic", "meta.json", "the id of Heartbeat", AGENT, REMOVE),
    agent("/opt/Elastic/Agent", "fleet.enc|fleet.yml", "the enrolment of Elastic Agent", AGENT, ENROL),
    agent("/etc/elastic-agent", "fleet.enc|fleet.yml", "the enrolment of Elastic Agent", AGENT, ENROL),
    agent("/var/lib/alloy/data", "alloy_seed.json", "the id of Grafana Alloy", AGENT, REMOVE),
    agent("/var/lib/netdata/registry", "netdata.public.unique.id", "the id of Netdata", AGENT, REMOVE),
    agent("/var/lib/netdata/cloud.d", "claimed_id|private.pem", "the identity of Netdata in its cloud", AGENT, ENROL),
    agent("/var/lib/cmk-agent", "registered_connections.json", "the registration of the Checkmk agent", AGENT, ENROL),
    agent("/var/lib/icinga2/certs", "*.key", "the key of an Icinga node", AGENT, ENROL),
    agent("/var/lib/dynatrace/oneagent/agent/config", "ruxithost.id", "the host id of Dynatrace OneAgent", AGENT, REMOVE),
    setting(ERROR, ("/opt/splunkforwarder/etc", "instance.cfg", "guid"), "the GUID of a Splunk forwarder", AGENT, "splunk clone-prep-clear-config"),
    setting(WARNING, ("/opt/splunkforwarder/etc/system/local", "server.conf", "serverName"), "the name of a Splunk forwarder", NAMED, "splunk clone-prep-clear-config"),
    setting(WARNING, ("/opt/splunkforwarder/etc/system/local", "inputs.conf", "host"), "the name of a Splunk forwarder", NAMED, "splunk clone-prep-clear-config"),
];

#[rustfmt::skip]
const SECURITY: &[IdentityRule] = &[
    agent("/var/ossec/etc", "client.keys", "the key of a Wazuh or OSSEC agent", AGENT, ENROL),
    agent("/opt/CrowdStrike", "falconstore", "the agent id of CrowdStrike Falcon", AGENT, "/opt/CrowdStrike/falconctl -d -f --aid"),
    agent("/opt/sentinelone/configuration", "*", "settings of a SentinelOne agent, its identity among them", AGENT,
        "install the agent when a machine first starts, or prepare it by sentinelctl"),
    setting(ERROR, ("/var/opt/carbonblack/psc", "cfg.ini", "DeviceId"), "the device id of Carbon Black", AGENT, ENROL),
    agent("/var/opt/ds_agent/dsa_core", "ds_agent.crt", "the identity of a Trend Micro agent", AGENT, "/opt/ds_agent/dsa_control -r"),
    agent("/opt/sophos-spl/base/etc", "machine_id.txt", "the machine id of Sophos", AGENT, "prepare it as a gold image"),
    agent("/var/opt/eset/RemoteAdministrator/Agent", "data.db", "the identity of an ESET agent", AGENT, ENROL),
    agent("/etc/qualys", "hostid", "the host id of Qualys", AGENT, REMOVE),
    agent("/etc", "tenable_tag", "the host id of Tenable", AGENT, "nessuscli agent unlink; remove it"),
    agent("/opt/nessus_agent/var/nessus", "uuid", "the id of a Nessus agent", AGENT, "nessuscli prepare-image"),
    agent("/var/osquery/osquery.db", "CURRENT", "the database of osquery, with its UUID and node key", AGENT, "rm -r /var/osquery/osquery.db"),
    agent("/opt/orbit", "secret-orbit-node-key.txt", "the node key of Fleet", AGENT, REMOVE),
    agent("/opt/orbit/osquery.db", "CURRENT", "the database of Fleet's osquery", AGENT, "rm -r /opt/orbit/osquery.db"),
    agent("/var/kolide-k2/k2device.kolide.com", "launcher.db", "the identity of Kolide", AGENT, REMOVE),
    agent("/etc", "velociraptor.writeback.yaml", "the identity of a Velociraptor client", AGENT, REMOVE),
];

#[rustfmt::skip]
const NETWORKS: &[IdentityRule] = &[
    agent("/var/lib/tailscale", "tailscaled.state", "a node of Tailscale", PEER, ENROL),
    agent("/var/lib/zerotier-one", "identity.secret", "a node of ZeroTier", PEER, "rm /var/lib/zerotier-one/identity.*"),
    agent("/etc/netbird", "config.json", "a peer of NetBird", PEER, ENROL),
    agent("/var/lib/netbird", "default.json|config.json", "a peer of NetBird", PEER, ENROL),
    agent("/etc/netclient", "netclient.json|netclient.yml", "a node of Netmaker", PEER, ENROL),
    setting(ERROR, ("/etc/wireguard", "*.conf", "PrivateKey"), "a private key of WireGuard", PEER, GIVE),
    agent("/etc/nebula", "*.key", "the key of a Nebula host", PEER, GIVE),
    agent("/etc/openvpn", "*.key", "a key of OpenVPN", PEER, GIVE),
    agent("/etc/openvpn/client", "*.key", "a key of an OpenVPN client", PEER, GIVE),
    secret("/etc/openvpn/server", "*.key", "a key of an OpenVPN server", PASSES, GIVE),
    secret("/usr/local/openvpn_as/etc/db", "certs.db|config_local.db", "certificates and settings of OpenVPN Access Server", PASSES,
        "set it up when a machine first starts"),
    agent("/etc/ipsec.d/private", "*", "a private key of strongSwan", PEER, GIVE),
    agent("/etc/swanctl/private", "*", "a private key of strongSwan", PEER, GIVE),
    setting(ERROR, ("/etc/yggdrasil", "yggdrasil.conf", "PrivateKey"), "a node of Yggdrasil", PEER, GIVE),
    setting(ERROR, ("/etc", "yggdrasil.conf", "PrivateKey"), "a node of Yggdrasil", PEER, GIVE),
    agent("/etc/cloudflared", "*.json|cert.pem", "the credentials of a Cloudflare tunnel", PEER, GIVE),
    agent("/var/lib/cloudflare-warp", "reg.json", "the registration of Cloudflare WARP", PEER, ENROL),
    agent("/etc/twingate", "connector.conf", "the tokens of a Twingate connector", PEER, GIVE),
    agent("/opt/openziti/etc/identities", "*.json", "an identity of OpenZiti", PEER, ENROL),
    agent("/var/lib/tor/keys", "secret_*|ed25519_*_secret_key*", "keys of a Tor relay", PEER, REMOVE),
    agent("/var/lib/teleport", "host_uuid", "the id of a Teleport node", AGENT, "rm -r /var/lib/teleport"),
    agent("/var/lib/teleport/proc", "sqlite.db", "the identity of a Teleport node", AGENT, "rm -r /var/lib/teleport"),
    agent("/etc/openvswitch", "system-id.conf", "the system id of Open vSwitch", MEMBER, REMOVE),
];

#[rustfmt::skip]
const CLUSTERS: &[IdentityRule] = &[
    agent("/var/lib/docker", "engine-id", "the id of the Docker engine", AGENT, REMOVE),
    agent("/etc/docker", "key.json", "the key of the Docker engine", AGENT, REMOVE),
    agent("/var/lib/docker/swarm", "docker-state.json|state.json", "a node of a Docker swarm", MEMBER, "docker swarm leave"),
    agent("/var/lib/kubelet/pki", "*.pem|*.key", "keys of a kubelet", MEMBER, "kubeadm reset"),
    agent("/etc/kubernetes", "kubelet.conf|admin.conf|bootstrap-kubelet.conf", "credentials of a Kubernetes node", MEMBER, "kubeadm reset"),
    agent("/etc/kubernetes/pki", "*.key", "keys of a Kubernetes control plane", MEMBER, "kubeadm reset"),
    agent("/etc/rancher/node", "password", "the node password of k3s or RKE2", MEMBER, JOIN),
    agent("/var/lib/rancher/k3s/agent", "client-kubelet.key", "keys of a k3s agent", MEMBER, JOIN),
    agent("/var/lib/rancher/k3s/server", "token|node-token", "the token of a k3s server", MEMBER, JOIN),
    agent("/var/lib/rancher/rke2/agent", "client-kubelet.key", "keys of an RKE2 agent", MEMBER, JOIN),
    agent("/var/lib/rancher/rke2/server", "token|node-token", "the token of an RKE2 server", MEMBER, JOIN),
    agent("/var/lib/rancher/agent", "rancher2_connection_info.json", "the identity of Rancher's system agent", AGENT, ENROL),
    agent("/var/lib/k0s/pki", "*.key", "keys of k0s", MEMBER, "k0s reset"),
    agent("/var/lib/k0s/kubelet/pki", "*.pem|*.key", "keys of a k0s worker", MEMBER, "k0s reset"),
    agent("/var/snap/microk8s/current/certs", "*.key", "keys of MicroK8s", MEMBER, "install it when a machine first starts"),
    agent("/var/lib/etcd/member/snap", "db", "a member of etcd", MEMBER, JOIN),
    agent("/var/lib/consul", "node-id", "the id of a Consul node", MEMBER, REMOVE),
    agent("/opt/consul", "node-id", "the id of a Consul node", MEMBER, REMOVE),
    agent("/opt/consul/data", "node-id", "the id of a Consul node", MEMBER, REMOVE),
    agent("/var/consul", "node-id", "the id of a Consul node", MEMBER, REMOVE),
    agent("/var/lib/nomad/client", "client-id|secret-id", "the id of a Nomad client", MEMBER, REMOVE),
    agent("/opt/nomad/client", "client-id|secret-id", "the id of a Nomad client", MEMBER, REMOVE),
    agent("/opt/nomad/data/client", "client-id|secret-id", "the id of a Nomad client", MEMBER, REMOVE),
    agent("/opt/vault/data", "node-id", "the id of a Vault node", MEMBER, JOIN),
    secret("/var/lib/lxd", "server.key", "the key of LXD", PASSES, "rm /var/lib/lxd/server.*"),
    secret("/var/snap/lxd/common/lxd", "server.key", "the key of LXD", PASSES, "rm /var/snap/lxd/common/lxd/server.*"),
    secret("/var/lib/incus", "server.key", "the key of Incus", PASSES, "rm /var/lib/incus/server.*"),
    agent("/var/lib/pve-cluster", "config.db", "the cluster file system of Proxmox VE", MEMBER, JOIN),
    agent("/var/lib/glusterd", "glusterd.info", "the id of a Gluster peer", MEMBER, REMOVE),
    secret("/etc/ceph", "*.keyring", "a key of Ceph", SECRET, GIVE),
    secret("/etc/corosync", "authkey", "the key of a Corosync cluster", SECRET, JOIN),
];

#[rustfmt::skip]
const DATABASES: &[IdentityRule] = &[
    secret("/var/lib/rabbitmq", ".erlang.cookie", "the cookie of RabbitMQ", "clones can command each other", REMOVE),
    agent("/var/lib/mysql", "auto.cnf", "the server UUID of MySQL", MEMBER, "rm /var/lib/mysql/auto.cnf"),
    secret("/var/lib/mysql", "server-key.pem|private_key.pem", "TLS keys of MySQL", PASSES, "rm /var/lib/mysql/*.pem"),
    agent("/var/lib/elasticsearch/_state", "*", "the node id of Elasticsearch", MEMBER, "remove the data folder"),
    agent("/var/lib/opensearch/_state", "*", "the node id of OpenSearch", MEMBER, "remove the data folder"),
    agent("/var/lib/kafka", "meta.properties", "the id of a Kafka broker", MEMBER, JOIN),
    agent("/var/lib/zookeeper", "myid", "the id of a ZooKeeper server", MEMBER, JOIN),
    agent("/var/lib/clickhouse", "uuid", "the UUID of a ClickHouse server", MEMBER, REMOVE),
    agent("/var/lib/redis", "nodes.conf", "a node of a Redis cluster", MEMBER, JOIN),
    agent("/var/lib/neo4j/data", "server_id", "the id of a Neo4j server", MEMBER, REMOVE),
];

#[rustfmt::skip]
const OTHERS: &[IdentityRule] = &[
    setting(ERROR, ("/etc/gitlab-runner", "config.toml", "token"), "the token of a GitLab runner", AGENT, "gitlab-runner unregister --all-runners"),
    agent("/etc/gitlab-runner", ".runner_system_id", "the id of a GitLab runner", AGENT, REMOVE),
    agent("/actions-runner", ".credentials|.credentials_rsaparams", "the credentials of a GitHub Actions runner", AGENT, "config.sh remove"),
    agent("/opt/actions-runner", ".credentials|.credentials_rsaparams", "the credentials of a GitHub Actions runner", AGENT, "config.sh remove"),
    agent("/home/runner/actions-runner", ".credentials|.credentials_rsaparams", "the credentials of a GitHub Actions runner", AGENT, "config.sh remove"),
    agent("/home/ubuntu/actions-runner", ".credentials|.credentials_rsaparams", "the credentials of a GitHub Actions runner", AGENT, "config.sh remove"),
    agent("/azagent", ".credentials|.credentials_rsaparams", "the credentials of an Azure DevOps agent", AGENT, "config.sh remove"),
    agent("/opt/azagent", ".credentials|.credentials_rsaparams", "the credentials of an Azure DevOps agent", AGENT, "config.sh remove"),
    agent("/var/lib/act_runner", ".runner", "the token of a Gitea runner", AGENT, ENROL),
    agent("/var/lib/forgejo-runner", ".runner", "the token of a Forgejo runner", AGENT, ENROL),
    agent("/etc/woodpecker", "agent.conf", "the id of a Woodpecker agent", AGENT, REMOVE),
    setting(ERROR, ("/opt/buildagent/conf", "buildAgent.properties", "authorizationToken"), "the token of a TeamCity agent", AGENT, "empty name and authorizationToken"),
    secret("/var/lib/jenkins", "identity.key.enc|secret.key", "the identity of a Jenkins controller", PASSES, REMOVE),
    agent("/var/lib/veeam", "veeam_db.sqlite", "the identity of Veeam Agent", AGENT, ENROL),
    agent("/var/lib/crashplan", ".identity", "the identity of CrashPlan", AGENT, REMOVE),
    agent("/root/.config/syncthing", "key.pem", "a device of Syncthing", PEER, REMOVE),
    agent("/root/.local/state/syncthing", "key.pem", "a device of Syncthing", PEER, REMOVE),
    agent("/var/lib/boinc-client", "client_state.xml", "the host id of BOINC", AGENT, REMOVE),
];
