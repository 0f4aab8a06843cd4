#!/usr/bin/perl -T
# Stands for a node of Proxmox VE: calls the storage plugin as Proxmox does, by the documented interface of storage plugins. What the
# plugin uses of Proxmox is here in a few lines of our own; nothing of Proxmox is in it.
#
# Usage: perl -T node.pl PLUGIN PROGRAM PID_FILES, with one line of JSON for each call on standard input: { "call", "storage", "config",
# "api", "pve", and what the call wants }. A line of JSON for each: { "result" } or { "error" }, and { "printed", "warned" }.
#
# "pve" is the version, since they do not call a plugin alike:
#   8      a start gives no hints. The end of a QEMU that was asked to quit from the host deactivates nothing, if that was not 'qm stop'
#   9.0    a start says by a hint that volumes may be deactivated. Ends as before. 'qm showcmd' activates volumes of a VM that is off
#   9.1    the same, and each end deactivates once: a flag file says that it is still to be done
use strict;
use warnings;

$ENV{PATH} = '/usr/sbin:/usr/bin:/sbin:/bin';
delete @ENV{qw(IFS CDPATH ENV BASH_ENV)};
our ($api, $pve, $pid_files);
# The configurations of VMs, each { lock, vmstate }.
our %configs;
BEGIN { $INC{"PVE/$_.pm"} = __FILE__ for qw(Storage Storage/Plugin Tools Cluster SectionConfig); }

package PVE::Tools {
    # By a list of arguments; what is printed line by line; dies if it fails or takes too long.
    sub run_command {
        my ($command, %with) = @_;
        my @ends;
        for (0, 1) { pipe($ends[$_]{read}, $ends[$_]{write}) or die "pipe: $!\n"; }
        my $pid = fork() // die "fork: $!\n";
        if (!$pid) {
            open(STDOUT, '>&', $ends[0]{write});
            open(STDERR, '>&', $ends[1]{write});
            open(STDIN, '<', '/dev/null');
            # As in Proxmox's own, nothing that is not to be trusted is run.
            eval { exec { $command->[0] } @$command };
            print STDERR $@;
            POSIX::_exit(126);
        }
        close($_->{write}) for @ends;
        eval {
            local $SIG{ALRM} = sub { die "got timeout\n" };
            alarm($with{timeout} // die "no time limit\n");
            for my $end ([0, 'outfunc'], [1, 'errfunc']) {
                my $lines = $ends[$end->[0]]{read};
                while (my $line = <$lines>) { chomp($line); $with{$end->[1]}->($line); }
            }
            alarm(0);
        };
        my $failed = $@;
        alarm(0);
        kill('KILL', $pid) if $failed;
        waitpid($pid, 0);
        $failed = 'exit code ' . ($? >> 8) . "\n" if !$failed && $?;
        die "command '@$command' failed: $failed" if $failed;
        return 0;
    }

    sub file_read_firstline {
        my ($path) = @_;
        open(my $file, '<', $path) or return undef;
        my $line = <$file>;
        chomp($line) if defined($line);
        return $line;
    }

    sub df { return -d $_[0] ? { total => 1000, avail => 600, used => 400 } : undef; }
}

package PVE::Cluster {
    sub get_guest_config_properties {
        my ($properties, $vmid) = @_;
        die "ipcc_send_rec failed: Connection refused\n" if $main::configs{$vmid}{unreadable};
        return { $vmid => { map { defined($main::configs{$vmid}{$_}) ? ($_ => $main::configs{$vmid}{$_}) : () } @$properties } };
    }
}

package PVE::Storage::Plugin {
    sub import { }
}

package PVE::Storage {
    our $plugin = 'PVE::Storage::Custom::SpillwayPlugin';
    sub APIVER { return $main::api; }

    sub activate_volumes {
        my ($storage, $config, $volumes, $hints) = @_;
        $plugin->activate_volume($storage, $config, $_, undef, {}, $hints) for @$volumes;
    }

    sub deactivate_volumes {
        my ($storage, $config, $volumes) = @_;
        my @failed = grep { !eval { $plugin->deactivate_volume($storage, $config, $_, undef, {}); 1 } && (warn($@), 1) } @$volumes;
        die "not deactivated: @failed\n" if @failed;
    }

    sub volume_size_info {
        my ($storage, $config, $volname) = @_;
        return $plugin->volume_size_info($config, $storage, $volname, 5);
    }
}

# What starts and ends VMs. A process that waits stands for QEMU: it ends with this program.
package PVE::QemuServer {
    my (%qemu, %cleanup_flag);

    sub is_running { return defined($qemu{ $_[0] }); }

    sub run_qemu {
        my ($vmid) = @_;
        pipe(my $waits, my $holds) or die "pipe: $!\n";
        my $pid = fork() // die "fork: $!\n";
        if (!$pid) {
            open(STDIN, '<&', $waits);
            open(STDOUT, '>', '/dev/null');
            # Only words that are not tainted may be run.
            eval { exec {'/usr/bin/perl'} 'kvm', '-e', '<STDIN>', '--', '-id', ($vmid =~ /^([0-9]+)\z/) };
            POSIX::_exit(126);
        }
        $qemu{$vmid} = { pid => $pid, holds => $holds };
        open(my $file, '>', "$main::pid_files/" . ($vmid =~ /^([0-9]+)\z/)[0] . '.pid') or die "pid file: $!\n";
        print $file "$pid\n";
        # Its command line is the interpreter's until it has begun.
        until (main::content("/proc/$pid/cmdline") =~ /-id/) { select(undef, undef, undef, 0.01); }
    }

    # The process ends. Its pid file stays until the clean-up.
    sub end_qemu {
        my ($vmid) = @_;
        my $qemu = delete($qemu{$vmid}) // die "VM $vmid is not running\n";
        close($qemu->{holds});
        waitpid($qemu->{pid}, 0);
    }

    sub vm_start {
        my ($storage, $config, $asked, %with) = @_;
        my ($vmid, $volumes) = @$asked{qw(vmid volumes)};
        my $conf = $main::configs{$vmid} //= {};
        my $is_resumed = ($conf->{lock} // '') eq 'suspended' || defined($conf->{vmstate});
        die "VM is locked ($conf->{lock})\n" if $conf->{lock} && $conf->{lock} ne 'suspended' && !$with{skiplock};
        die "VM $vmid already running\n"     if is_running($vmid);
        my $hints = $main::pve >= 9 ? { 'guest-is-windows' => 0, 'plugin-may-deactivate-volume' => 1 } : undef;
        eval {
            PVE::Storage::activate_volumes($storage, $config, $volumes, $hints);
            die "start failed: QEMU exited with code 1\n" if $asked->{qemu_fails};
        };
        if (my $error = $@) {
            # Version 8 does so only when QEMU itself fails.
            eval { PVE::Storage::deactivate_volumes($storage, $config, $volumes) } if $main::pve >= 9 || $asked->{qemu_fails};
            warn $@ if $@;
            die $error;
        }
        run_qemu($vmid);
        $cleanup_flag{$vmid} = 1;
        delete @$conf{qw(lock vmstate)} if $is_resumed;
        return 1;
    }

    sub vm_stop_cleanup {
        my ($storage, $config, $vmid, $volumes, $keeps_active) = @_;
        return if $main::pve >= 9.1 && !$cleanup_flag{$vmid};
        eval { PVE::Storage::deactivate_volumes($storage, $config, $volumes) if !$keeps_active; };
        warn $@ if $@;
        unlink("$main::pid_files/" . ($vmid =~ /^([0-9]+)\z/)[0] . '.pid') if !$@;
        delete $cleanup_flag{$vmid};
    }

    # What Proxmox does when it hears of QEMU's end. The end is clean if QEMU said so, and the guest's if that had turned itself off.
    sub cleanup {
        my ($storage, $config, $asked, $is_clean, $is_guests) = @_;
        vm_stop_cleanup($storage, $config, @$asked{qw(vmid volumes)}, 0) if !$is_clean || $is_guests || $main::pve >= 9.1;
    }

    # By 'qm stop'. A shutdown is one of the guest's own, so that both clean up.
    sub vm_stop {
        my ($storage, $config, $asked, $keeps_active) = @_;
        end_qemu($asked->{vmid});
        vm_stop_cleanup($storage, $config, @$asked{qw(vmid volumes)}, $keeps_active);
        cleanup($storage, $config, $asked, 1, $asked->{is_shutdown}) if !$asked->{is_cleaned_late};
        return 1;
    }

    # Something of the host ends QEMU: SIGTERM, or 'quit' in the monitor. Or SIGKILL.
    sub end_from_host {
        my ($storage, $config, $asked) = @_;
        end_qemu($asked->{vmid});
        cleanup($storage, $config, $asked, !$asked->{is_killed}, 0);
        return 1;
    }

    sub vm_suspend {
        my ($storage, $config, $asked) = @_;
        my $vmid = $asked->{vmid};
        @{ $main::configs{$vmid} }{qw(lock vmstate)} = ('suspending', "local:vm-$vmid-state-suspend");
        end_qemu($vmid);
        $main::configs{$vmid}{lock} = 'suspended';
        cleanup($storage, $config, $asked, 1, 0);
        return 1;
    }

    # 'qm showcmd', which takes no lock, and asks for none.
    sub vm_commandline {
        my ($storage, $config, $asked) = @_;
        PVE::Storage::activate_volumes($storage, $config, $asked->{volumes}) if $main::pve >= 9 && !is_running($asked->{vmid});
        return 1;
    }
}

# A backup, which activates the disks that it is to contain, and asks for the size of each. In mode stop it turns the VM off, starts it
# again for the backup, and lets it go on.
package PVE::VZDump::QemuServer {
    sub prepare {
        my ($storage, $config, $volname) = @_;
        PVE::Storage::activate_volumes($storage, $config, [$volname]);
        return size($storage, $config, $volname);
    }

    sub size {
        my ($storage, $config, $volname) = @_;
        my $size = eval { PVE::Storage::volume_size_info($storage, $config, $volname) };
        die "cannot determine size of volume - $@" if $@;
        return $size;
    }

    sub stop_mode {
        my ($storage, $config, $asked) = @_;
        $main::configs{ $asked->{vmid} }{lock} = 'backup';
        PVE::QemuServer::vm_stop($storage, $config, { %$asked, is_shutdown => 1 }, 1);
        PVE::QemuServer::vm_start($storage, $config, $asked, skiplock => 1);
        delete $main::configs{ $asked->{vmid} }{lock};
        return 1;
    }
}

package main;

use JSON  ();
use POSIX ();

# What Proxmox makes of a path, for versions that pass it to QEMU's -drive and know no qemu_blockdev_options, or leave it to the base.
sub node_of_path {
    my ($path) = @_;
    return { driver => 'nbd', server => { type => 'unix', path => $2 }, defined($1) ? (export => $1) : () }
        if $path =~ m|^nbd\+unix:///(\S+)?\?socket=(\S+)$|;
    return { driver => 'file', filename => $path } if $path =~ m|^/|;
    die "no node: $path\n";
}

# The options that Proxmox permits, with a format and a throttle above, as it starts a VM.
sub blockdev {
    my ($node) = @_;
    my %permitted = (nbd => [qw(server export reconnect-delay open-timeout)], file => ['filename']);
    my %known     = map { $_ => 1 } 'driver', @{ $permitted{ $node->{driver} } // die "driver not allowed\n" };
    $known{$_} or die "option '$_' not allowed\n" for keys %$node;
    my %common = (discard => 'unmap', 'detect-zeroes' => 'unmap', 'read-only' => JSON::false);
    my $cache  = { direct => JSON::true, 'no-flush' => JSON::false };
    my $file   = { %$node, %common, cache => $cache, 'node-name' => 'e0' };
    my $format = { driver => 'raw', file => $file, %common, cache => $cache, 'node-name' => 'f0' };
    return { driver => 'throttle', 'throttle-group' => 'throttle0', file => $format, %common, 'node-name' => 'drive0' };
}

sub content {
    open(my $file, '<', $_[0]) or return '';
    return readline($file) // '';
}

(my ($file, $program), $pid_files) = map { /^(.+)\z/ ? $1 : die "usage\n" } @ARGV[0 .. 2];
$api = 15;
{
    no strict 'refs';
    @{'PVE::Storage::Custom::SpillwayPlugin::ISA'} = ();
}
require $file;
my $plugin = $PVE::Storage::plugin;
{
    no warnings 'once';
    $PVE::Storage::Custom::SpillwayPlugin::PROGRAM   = $program;
    $PVE::Storage::Custom::SpillwayPlugin::PID_FILES = $pid_files;
}

# Hints are of version 9.
sub set_version {
    ($pve) = @_;
    no strict 'refs';
    delete ${'PVE::Storage::Plugin::'}{is_hint_supported};
    my %known = map { $_ => 1 } qw(guest-is-windows plugin-may-deactivate-volume);
    *{'PVE::Storage::Plugin::is_hint_supported'} = sub { return $known{ $_[0] } } if $pve >= 9;
}

my %calls = (
    api              => sub { $plugin->api() },
    about            => sub { { data => $plugin->plugindata(), options => $plugin->options(), properties => $plugin->properties() } },
    add              => sub { my ($s, $c) = @_; $plugin->on_add_hook($s, $c); 1 },
    activate_storage => sub { my ($s, $c) = @_; $plugin->activate_storage($s, $c, {}) },
    status           => sub { my ($s, $c) = @_; [$plugin->status($s, $c, {})] },
    list             => sub { my ($s, $c, $a) = @_; $plugin->list_images($s, $c, $a->{vmid}, $a->{volumes}, {}) },
    parse            => sub { my ($s, $c, $a) = @_; [$plugin->parse_volname($a->{volume})] },
    alloc            => sub { my ($s, $c, $a) = @_; $plugin->alloc_image($s, $c, $a->{vmid}, $a->{format} // 'raw', $a->{name}, $a->{kib}) },
    free             => sub { my ($s, $c, $a) = @_; $plugin->free_image($s, $c, $a->{volume}, 0, 'raw'); 1 },
    create_base      => sub { my ($s, $c, $a) = @_; $plugin->create_base($s, $c, $a->{volume}) },
    clone            => sub { my ($s, $c, $a) = @_; $plugin->clone_image($c, $s, $a->{volume}, $a->{vmid}, $a->{snapshot}) },
    activate         => sub { my ($s, $c, $a) = @_; $plugin->activate_volume($s, $c, $a->{volume}, $a->{snapshot}, {}, $a->{hints}); 1 },
    deactivate       => sub { my ($s, $c, $a) = @_; $plugin->deactivate_volume($s, $c, $a->{volume}, undef, {}); 1 },
    map              => sub { my ($s, $c, $a) = @_; $plugin->map_volume($s, $c, $a->{volume}) },
    path             => sub { my ($s, $c, $a) = @_; [$plugin->path($c, $a->{volume}, $s, $a->{snapshot})] },
    size             => sub { my ($s, $c, $a) = @_; [PVE::Storage::volume_size_info($s, $c, $a->{volume})] },
    backup           => sub { my ($s, $c, $a) = @_; PVE::VZDump::QemuServer::prepare($s, $c, $a->{volume}) },
    backup_size      => sub { my ($s, $c, $a) = @_; PVE::VZDump::QemuServer::size($s, $c, $a->{volume}) },
    backup_stop_mode => sub { PVE::VZDump::QemuServer::stop_mode(@_) },
    start            => sub { PVE::QemuServer::vm_start(@_) },
    stop             => sub { PVE::QemuServer::vm_stop(@_) },
    end_from_host    => sub { PVE::QemuServer::end_from_host(@_) },
    suspend          => sub { PVE::QemuServer::vm_suspend(@_) },
    showcmd          => sub { PVE::QemuServer::vm_commandline(@_) },
    configure        => sub { my ($s, $c, $a) = @_; $configs{ $a->{vmid} } = $a->{properties}; 1 },
    configuration    => sub { my ($s, $c, $a) = @_; $configs{ $a->{vmid} } // {} },
    resize           => sub { my ($s, $c, $a) = @_; $plugin->volume_resize($c, $s, $a->{volume}, $a->{bytes}, $a->{running}, undef); 1 },
    feature          => sub { my ($s, $c, $a) = @_; $plugin->volume_has_feature($c, $a->{feature}, $s, $a->{volume}, $a->{snapshot}, $a->{running}) ? 1 : 0 },
    snapshot         => sub { my ($s, $c, $a) = @_; $plugin->volume_snapshot($c, $s, $a->{volume}, 'one') },
    rollback         => sub { my ($s, $c, $a) = @_; $plugin->volume_rollback_is_possible($c, $s, $a->{volume}, 'one') },
    export           => sub { my ($s, $c, $a) = @_; $plugin->volume_export($c, $s, undef, $a->{volume}, 'raw+size') },
    export_formats   => sub { my ($s, $c, $a) = @_; [$plugin->volume_export_formats($c, $s, $a->{volume})] },
    rename           => sub { my ($s, $c, $a) = @_; $plugin->rename_volume($c, $s, $a->{volume}, 102) },
    blockdev         => sub { my ($s, $c, $a) = @_; blockdev($plugin->qemu_blockdev_options($c, $s, $a->{volume}, '10.0+pve0', { hints => {} })) },
    path_node        => sub { my ($s, $c, $a) = @_; node_of_path(scalar($plugin->path($c, $a->{volume}, $s))) },
);

# As Proxmox has them from its API: not to be trusted with files and programs before they are looked at.
sub tainted {
    my ($value) = @_;
    return ref($value) eq 'HASH' ? { map { $_ => tainted($value->{$_}) } keys %$value }
        : ref($value) eq 'ARRAY' ? [map { tainted($_) } @$value]
        : ref($value) || !defined($value) ? $value
        :                                   $value . substr($ENV{TAINT} // die("no TAINT\n"), 0, 0);
}

$| = 1;
while (my $line = <STDIN>) {
    my $asked = tainted(JSON::decode_json($line));
    $api = $asked->{api} // 15;
    set_version($asked->{pve} // 9.1);
    my ($printed, @warned) = ('');
    local $SIG{__WARN__} = sub { push @warned, @_ };
    open(my $screen, '>', \$printed);
    my $real = select($screen);
    my $result = eval { $calls{ $asked->{call} }->($asked->{storage}, $asked->{config}, $asked) };
    my $error  = $@;
    select($real);
    my $answer = { printed => $printed, warned => \@warned, $error ne '' ? (error => $error) : (result => $result) };
    print JSON->new->canonical->allow_nonref->encode($answer), "\n";
}
