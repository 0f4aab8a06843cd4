#!/usr/bin/perl -T
# Stands for a node of Proxmox VE: calls the storage plugin as Proxmox does, by the documented interface of storage plugins. What the
# plugin uses of Proxmox is here in a few lines of our own; nothing of Proxmox is in it.
#
# Usage: perl -T node.pl PLUGIN PROGRAM, with one line of JSON for each call on standard input: { "call", "storage", "config", "api",
# "lock", and what the call wants }. A line of JSON for each: { "result" } or { "error" }, and { "printed", "warned" }.
use strict;
use warnings;

$ENV{PATH} = '/usr/sbin:/usr/bin:/sbin:/bin';
delete @ENV{qw(IFS CDPATH ENV BASH_ENV)};
our ($api, $lock);
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
        return { $vmid => $main::lock ? { lock => $main::lock } : {} };
    }
}

package PVE::Storage::Plugin {
    sub import { }
}

package PVE::Storage {
    our $plugin = 'PVE::Storage::Custom::SpillwayPlugin';
    sub APIVER { return $main::api; }

    sub volume_size_info {
        my ($storage, $config, $volname) = @_;
        return $plugin->volume_size_info($config, $storage, $volname, 5);
    }
}

# A backup, which asks for the size of each disk that it is to contain, and starts a VM that is off.
package PVE::VZDump::QemuServer {
    sub prepare {
        my ($storage, $config, $volname) = @_;
        $PVE::Storage::plugin->activate_volume($storage, $config, $volname, undef, {});
        my $size = eval { PVE::Storage::volume_size_info($storage, $config, $volname) };
        die "cannot determine size of volume - $@" if $@;
        return $size;
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

my ($file, $program) = map { /^(.+)\z/ ? $1 : die "usage\n" } @ARGV[0, 1];
$api = 15;
{
    no strict 'refs';
    @{'PVE::Storage::Custom::SpillwayPlugin::ISA'} = ();
}
require $file;
my $plugin = $PVE::Storage::plugin;
{ no warnings 'once'; $PVE::Storage::Custom::SpillwayPlugin::PROGRAM = $program; }

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
    activate         => sub { my ($s, $c, $a) = @_; $plugin->activate_volume($s, $c, $a->{volume}, $a->{snapshot}, {}, {}); 1 },
    deactivate       => sub { my ($s, $c, $a) = @_; $plugin->deactivate_volume($s, $c, $a->{volume}, undef, {}); 1 },
    map              => sub { my ($s, $c, $a) = @_; $plugin->map_volume($s, $c, $a->{volume}) },
    path             => sub { my ($s, $c, $a) = @_; [$plugin->path($c, $a->{volume}, $s, $a->{snapshot})] },
    size             => sub { my ($s, $c, $a) = @_; [PVE::Storage::volume_size_info($s, $c, $a->{volume})] },
    backup           => sub { my ($s, $c, $a) = @_; PVE::VZDump::QemuServer::prepare($s, $c, $a->{volume}) },
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
    ($api, $lock) = ($asked->{api} // 15, $asked->{lock});
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
