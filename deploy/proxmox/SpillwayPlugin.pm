package PVE::Storage::Custom::SpillwayPlugin;

# SPDX-License-Identifier: MIT OR Apache-2.0
#
# Storage plugin for Proxmox VE: a VM's disk becomes a template, and linked clones of the template have disposable disks of Spillway.
# docs/how-to/proxmox.md says how to use it, docs/design/058-proxmox.md why it is as it is.
#
# A volume is one of three things:
#   vm-ID-...                        a file in the storage's folder. It keeps its content: systems are installed on it
#   base-ID-disk-N                   a template: the version of the image STORAGE-base-ID-disk-N of spillwayd
#   base-ID-disk-N/vm-ID-disk-N      a linked clone: the machine STORAGE-vm-ID-disk-N of the catalog that has the template's name
#
# Owns the files in the storage's folder, and those images, catalogs and machines. Never runs a shell, and never resets the disk of a VM
# that runs or is hibernated. Invariant: a clone's disk is forgotten when it is deactivated, or when its VM starts.

use v5.36;

use Fcntl qw(O_CREAT O_EXCL O_RDWR O_TRUNC O_WRONLY);
use File::Path ();
use JSON       ();
use PVE::Cluster;
use PVE::Tools;

use base qw(PVE::Storage::Plugin);

# Versions of the storage API that this file is written for.
use constant { OLDEST_API => 10, NEWEST_API => 15, MIB => 1 << 20 };
# Seconds: a question to the daemon; the start or the end of a disk; the import of a template.
use constant { ASK => 20, RUN => 120, IMPORT => 6 * 3600 };
# Seconds for which QEMU waits for a disk's worker. One that has died is replaced within a second.
use constant RECONNECT => 60;
# Most bytes of an answer that are kept.
use constant MOST_BYTES => 64 << 20;
# As many as Proxmox permits for a guest.
use constant MOST_VOLUMES => 1024;
# Exit code of 'spillway' when there is no object of that name.
use constant NOT_FOUND => 66;

our $PROGRAM = '/usr/bin/spillway';
# Where Proxmox has the pid files of its VMs.
our $PID_FILES = '/run/qemu-server';

my $ID    = qr/[1-9][0-9]{2,8}/;
my $DISK  = qr/disk-[0-9]{1,4}/;
my $OTHER = qr/cloudinit|fleece-[0-9]{1,4}|state-[A-Za-z0-9_-]{1,60}/;
my $SIZE  = '[1-9][0-9]{0,14}[KMGT]?';

# The plugin, and the settings of a storage

sub api {
    my $theirs = eval { PVE::Storage::APIVER() } // NEWEST_API;
    return OLDEST_API if $theirs < OLDEST_API;
    return $theirs < NEWEST_API ? $theirs : NEWEST_API;
}

sub type { return 'spillway'; }

sub plugindata {
    return { content => [{ images => 1 }, { images => 1 }], format => [{ raw => 1 }, 'raw'], 'sensitive-properties' => {} };
}

sub properties {
    my %path = (type => 'string', format => 'pve-storage-path');
    my %size = (type => 'string', pattern => $SIZE);
    my %full = (type => 'string', enum => ['pause', 'fail']);
    return {
        'spillway-dir'      => { %path, description => 'Folder of disks that are not templates. Default: /var/lib/spillway-pve/STORAGE.' },
        'spillway-state'    => { %path, description => 'State folder of spillwayd. Default: /var/lib/spillway.' },
        'spillway-socket'   => { %path, description => 'Socket of spillwayd. Default: /run/spillway/spillwayd.sock.' },
        'spillway-ram'      => { %size, description => 'RAM for what a linked clone writes, of templates made from now on. Default: 256M.' },
        'spillway-overflow' => { %size, description => 'Disk space for what the RAM has no space for. Default: 10G.' },
        'spillway-full'     => { %full, description => 'What a write does when both are full: wait for space, or fail. Default: pause.' },
    };
}

sub options {
    my %optional = map { $_ => { optional => 1 } } qw(nodes disable content spillway-ram spillway-overflow spillway-full);
    # Where the disks are, and what is known of them, does not change while there are any.
    my %fixed = map { $_ => { optional => 1, fixed => 1 } } qw(spillway-dir spillway-state spillway-socket);
    return { %optional, %fixed };
}

# A path of the settings, or of the daemon's answers, checked and untainted.
my sub checked_path ($path) {
    die "'$path': not a plain absolute path\n" if $path =~ m!/\.\.?(?:/|\z)! || $path !~ m!^((?:/[A-Za-z0-9_.+-]+)+)\z!;
    return $1;
}

my sub folder ($storeid, $scfg) {
    return checked_path($scfg->{'spillway-dir'} // "/var/lib/spillway-pve/$storeid");
}

# The name that the daemon has for an object: at most 63 characters, for which the ID of the storage leaves enough. And its label.
my sub object ($storeid, $name) {
    $storeid =~ /^([a-z](?:[a-z0-9-]{0,28}[a-z0-9])?)\z/
        or die "storage '$storeid': the ID of a storage of type spillway has at most 30 lower-case letters, digits and '-'\n";
    return "$1-$name";
}

my sub label ($storeid) {
    return object($storeid, '') =~ /^(.*)-\z/ ? "pve-storage=$1" : die "no label\n";
}

sub on_add_hook ($class, $storeid, $scfg, @) {
    object($storeid, 'x');
    return undef;
}

# Volumes

# What a volume's name says: { kind => 'file' | 'template' | 'clone', name, vmid, base, base_vmid }. Its parts are untainted.
my sub parsed ($volname) {
    return { kind => 'clone', name => $3, vmid => $4, base => $1, base_vmid => $2 }
        if $volname =~ m!^(base-($ID)-$DISK)/(vm-($ID)-$DISK)\z!;
    return { kind => 'template', name => $1, vmid => $2 } if $volname =~ m!^(base-($ID)-$DISK)\z!;
    return { kind => 'file',     name => $1, vmid => $2 } if $volname =~ m!^(vm-($ID)-(?:$DISK|$OTHER))\z!;
    die "unable to parse spillway volume name '$volname'\n";
}

sub parse_volname ($class, $volname, @) {
    my $volume   = parsed($volname);
    my $is_base = $volume->{kind} eq 'template' ? 1 : undef;
    return ('images', $volume->{name}, $volume->{vmid}, $volume->{base}, $volume->{base_vmid}, $is_base, 'raw');
}

# The daemon

# Runs 'spillway WORDS' without a shell, for so many seconds at most. Returns what it has printed, or undef if it knows no such object.
my sub spillway ($scfg, $seconds, @words) {
    my ($printed, $error) = ('', '');
    push @words, '--socket', checked_path($scfg->{'spillway-socket'}) if defined($scfg->{'spillway-socket'});
    my $keep = sub {
        $printed .= "$_[0]\n";
        die "the answer is too long\n" if length($printed) > MOST_BYTES;
    };
    my $keep_error = sub { $error = $_[0] if $_[0] =~ /^spillway: error: / || $error eq ''; };
    eval { PVE::Tools::run_command([$PROGRAM, @words], timeout => $seconds, outfunc => $keep, errfunc => $keep_error); };
    my $failed = $@ or return $printed;
    return undef if $failed =~ /exit code ${\NOT_FOUND}\b/;
    $error =~ s/^spillway: error: //;
    chomp(my $why = $error ne '' ? $error : $failed);
    die "'spillway @words[0, 1]': $why\n";
}

# The same, with an answer in JSON: a hash, or undef.
my sub answer ($scfg, @words) {
    my $printed = spillway($scfg, ASK, @words, '--json') // return undef;
    my $answer  = eval { JSON::decode_json($printed) };
    die "'spillway @words[0, 1]' has not printed what this plugin expects: are both of the same version?\n"
        if ref($answer) ne 'HASH';
    return $answer;
}

# A number of bytes in an answer, untainted.
my sub bytes ($number) {
    return ($number // '') =~ /^([0-9]{1,15})\z/ ? int($1) : die "the daemon's answer has no size\n";
}

my sub items ($answer) {
    my $items = ($answer // {})->{items};
    return grep { ref($_) eq 'HASH' } ref($items) eq 'ARRAY' ? @$items : ();
}

# The version that is a template. Undef: there is none. Its number is above 1 where there was a template of that name before.
my sub template ($storeid, $scfg, $name) {
    my $image    = object($storeid, $name);
    my $shown    = answer($scfg, 'image', 'show', $image) // return undef;
    my ($number) = ($shown->{image}{published} // '') =~ /^([1-9][0-9]{0,9})\z/ or return undef;
    my ($found)  = grep { $_->{version} == $number && $_->{state} eq 'ready' } @{ $shown->{versions} // [] };
    return undef if !$found;
    my $file = "images/$image/$number/disk.raw";
    return { number => $number, size => bytes($found->{size_bytes}), store => $found->{store}, file => $file };
}

my sub existing ($storeid, $volname, $found) {
    return $found // die "volume '$storeid:$volname' does not exist\n";
}

my sub existing_template ($storeid, $scfg, $name) {
    return existing($storeid, $name, template($storeid, $scfg, $name));
}

my sub template_path ($storeid, $scfg, $name) {
    my $template = existing_template($storeid, $scfg, $name);
    my ($store) = grep { $_->{name} eq $template->{store} } items(answer($scfg, 'store', 'list'));
    return checked_path("$store->{path}/$template->{file}") if $store && $store->{path};
    die "the store of '$storeid:$name' is not known\n";
}

my sub clone_socket ($storeid, $scfg, $volume) {
    my $state = checked_path($scfg->{'spillway-state'} // '/var/lib/spillway');
    return "$state/run/machines/" . object($storeid, $volume->{name}) . '/disk.nbd';
}

# The two files that say what is known of a clone's disk beyond what the daemon knows. docs/design/058-proxmox.md has the table of their
# states. The mark: the disk is to be forgotten before it is used again. The record: the run of the disk that the VM was started with.
my sub mark ($storeid, $scfg, $volume) {
    return folder($storeid, $scfg) . "/.forget-$volume->{name}";
}

my sub record ($storeid, $scfg, $volume) {
    return folder($storeid, $scfg) . "/.run-$volume->{name}";
}

my sub save ($path, $content) {
    sysopen(my $file, $path, O_CREAT | O_TRUNC | O_WRONLY, 0600) or return warn "$path: $!\n";
    syswrite($file, $content) // warn "$path: $!\n";
    return;
}

# A run of a clone's disk: its process, in this boot of the node. Empty: it does not run.
my sub run_of ($machine) {
    my ($pid) = (($machine // {})->{status}{run}{disk_pid} // '') =~ /^([0-9]{1,10})\z/ or return '';
    return "$pid " . PVE::Tools::file_read_firstline('/proc/sys/kernel/random/boot_id');
}

# Ends a clone's disk, and with it all that was written. The mark stays if the daemon cannot be reached. Nothing to do if there is none.
my sub forget ($storeid, $scfg, $volume) {
    my $mark = mark($storeid, $scfg, $volume);
    save($mark, '');
    my $machine = object($storeid, $volume->{name});
    spillway($scfg, RUN, 'machine', 'stop', $machine, '--force', '--wait', '--timeout', RUN - 10);
    unlink(record($storeid, $scfg, $volume));
    unlink($mark);
    return;
}

# Whether the VM's memory was saved to a disk: what its disks hold belongs to it. 'qm unlock' removes the lock, and Proxmox resumes all the
# same. Dies if the VM's configuration cannot be read, since what is wrongly forgotten is lost.
my sub is_hibernated ($vmid) {
    my $properties = PVE::Cluster::get_guest_config_properties(['lock', 'vmstate'], $vmid) // {};
    my $config     = $properties->{$vmid} // {};
    return defined($config->{vmstate}) || ($config->{lock} // '') =~ /^suspend(?:ed|ing)\z/ ? 1 : 0;
}

# Whether the VM runs: whether the process of its pid file is a QEMU of this VM. It does if that cannot be told.
my sub is_running ($vmid) {
    open(my $file, '<', "$PID_FILES/$vmid.pid") or return !$!{ENOENT};
    my ($pid) = (readline($file) // '') =~ /^([0-9]{1,10})$/ or return 1;
    open(my $process, '<', "/proc/$pid/cmdline") or return !$!{ENOENT};
    return (readline($process) // '') =~ /\x00-id\x00$vmid(?:\x00|\z)/ ? 1 : 0;
}

# Whether Proxmox activates volumes because it starts their VM. A version that cannot say so activates volumes of a VM that is off in its
# start, or in an action that holds the VM's lock as a start does.
my sub is_start ($hints) {
    my ($hint, $is_known) = ('plugin-may-deactivate-volume', PVE::Storage::Plugin->can('is_hint_supported'));
    return $is_known && $is_known->($hint) ? ($hints // {})->{$hint} : 1;
}

# Whether a backup asks, of the frame that has called the method of PVE::Storage that has called this plugin's.
my sub is_asked_by_backup {
    my ($asker) = caller(2);
    return defined($asker) && $asker =~ /^PVE::VZDump\b/;
}

sub path ($class, $scfg, $volname, $storeid, $snapname = undef, @) {
    die "disks of Spillway have no snapshots\n" if defined($snapname);
    my $volume = parsed($volname);
    my $path =
          $volume->{kind} eq 'clone'    ? 'nbd+unix:///?socket=' . clone_socket($storeid, $scfg, $volume)
        : $volume->{kind} eq 'template' ? template_path($storeid, $scfg, $volume->{name})
        :                                 folder($storeid, $scfg) . "/$volume->{name}";
    return wantarray ? ($path, $volume->{vmid}, 'images') : $path;
}

sub qemu_blockdev_options ($class, $scfg, $storeid, $volname, $machine_version = undef, $options = undef, @) {
    my $volume = parsed($volname);
    if ($volume->{kind} ne 'clone' || $options->{'snapshot-name'}) {
        my $path = $class->path($scfg, $volname, $storeid, $options->{'snapshot-name'});
        return { driver => 'file', filename => "$path" };
    }
    my $server = { type => 'unix', path => clone_socket($storeid, $scfg, $volume) };
    # The export of this run alone: QEMU does not go on with a disk that the daemon has had to start again, as the template.
    my ($pid) = (PVE::Tools::file_read_firstline(record($storeid, $scfg, $volume)) // '') =~ /^([0-9]{1,10}) /;
    my %export = defined($pid) ? (export => "run-$pid") : ();
    return { driver => 'nbd', server => $server, %export, 'reconnect-delay' => int(RECONNECT) };
}

sub activate_storage ($class, $storeid, $scfg, @) {
    object($storeid, 'x');
    my $folder = folder($storeid, $scfg);
    File::Path::make_path($folder, { mode => 0700 }) if !-d $folder;
    answer($scfg, 'host', 'show');
    return 1;
}

sub status ($class, $storeid, $scfg, @) {
    my $space = PVE::Tools::df(folder($storeid, $scfg), 2);
    return undef if !$space || !$space->{total};
    return ($space->{total}, $space->{avail}, $space->{used}, 1);
}

my $NO_BACKUP = "is a disposable disk, which is not backed up: exclude it (backup=0 in the options of the disk), or the VM\n";

# Starts a clone's disk, unless it runs. The disk of a VM that starts begins with the template; that of a VM that is resumed must be in the
# run that the VM had.
my sub activate_clone ($storeid, $scfg, $volname, $volume, $hints) {
    my ($vmid, $name) = ($volume->{vmid}, object($storeid, $volume->{name}));
    my ($record, $mark) = (record($storeid, $scfg, $volume), mark($storeid, $scfg, $volume));
    my ($is_resumed, $is_marked) = (is_hibernated($vmid), -e $mark);
    forget($storeid, $scfg, $volume) if !$is_resumed && ($is_marked || is_start($hints) && !is_running($vmid));
    my $was    = $is_resumed && !$is_marked ? PVE::Tools::file_read_firstline($record) // '' : '';
    my $looked = sub {
        my $machine = existing($storeid, $volname, answer($scfg, 'machine', 'show', $name));
        die "VM $vmid is hibernated, and what its disk '$volname' held is gone, since the disk is disposable:"
            . " delete the saved memory ('qm set $vmid --delete vmstate'), and start the VM\n"
            if $is_resumed && ($was eq '' || $was ne run_of($machine));
        return $machine;
    };
    my $machine = $looked->();
    if (($machine->{status}{phase} // '') ne 'running') {
        existing($storeid, $volname, spillway($scfg, RUN, 'machine', 'start', $name, '--wait', '--timeout', RUN - 10));
        $machine = $looked->();
    }
    # Of the first activation alone: if the disk has lost its content since, a saved memory does not belong to what it has now.
    save($record, run_of($machine)) if !$is_resumed && !-e $record;
    return;
}

sub activate_volume ($class, $storeid, $scfg, $volname, $snapname = undef, $cache = undef, $hints = undef, @) {
    die "disks of Spillway have no snapshots\n" if defined($snapname);
    my $volume = parsed($volname);
    if ($volume->{kind} eq 'template') {
        existing_template($storeid, $scfg, $volume->{name});
    } elsif ($volume->{kind} eq 'file') {
        die "volume '$storeid:$volname' does not exist\n" if !-f $class->path($scfg, $volname, $storeid);
    } else {
        # A backup activates volumes before it asks for their sizes, and leaves them so.
        die "'$volname' $NO_BACKUP" if is_asked_by_backup();
        activate_clone($storeid, $scfg, $volname, $volume, $hints);
    }
    return 1;
}

# What the disk of a hibernated VM holds is kept for the VM's memory, and so is its record: if that is deleted, the next start forgets.
sub deactivate_volume ($class, $storeid, $scfg, $volname, @) {
    my $volume = parsed($volname);
    forget($storeid, $scfg, $volume) if $volume->{kind} eq 'clone' && !is_hibernated($volume->{vmid});
    return 1;
}

sub map_volume ($class, $storeid, $scfg, $volname, @) {
    die "'$volname' is a disposable disk: it is served over NBD, and is no file\n" if parsed($volname)->{kind} eq 'clone';
    return scalar($class->path($scfg, $volname, $storeid));
}

# Making and removing volumes

my sub files ($storeid, $scfg) {
    my $folder = folder($storeid, $scfg);
    opendir(my $names, $folder) or return ();
    return map { my $volume = eval { parsed($_) }; $volume && $volume->{kind} eq 'file' ? $volume : () } readdir($names);
}

sub list_images ($class, $storeid, $scfg, $vmid = undef, $vollist = undef, @) {
    my ($folder, $prefix, $size_of, @found) = (folder($storeid, $scfg), object($storeid, ''), {});
    for my $volume (files($storeid, $scfg)) {
        my @stat = stat("$folder/$volume->{name}") or next;
        push @found, { volname => $volume->{name}, vmid => $volume->{vmid}, size => $stat[7], used => $stat[12] * 512, ctime => $stat[10] };
    }
    for my $image (items(answer($scfg, 'image', 'list'))) {
        my ($name, $owner) = ($image->{name} // '') =~ /^\Q$prefix\E(base-($ID)-$DISK)\z/ or next;
        my $template = template($storeid, $scfg, $name) // next;
        $size_of->{$name} = $template->{size};
        push @found, { volname => $name, vmid => $owner, size => $template->{size} };
    }
    for my $machine (items(answer($scfg, 'machine', 'list', '--label', label($storeid)))) {
        my ($base) = ($machine->{catalog} // '') =~ /^\Q$prefix\E(base-$ID-$DISK)\z/ or next;
        my ($name, $owner) = ($machine->{name} // '') =~ /^\Q$prefix\E(vm-($ID)-$DISK)\z/ or next;
        my $size = defined($machine->{size_bytes}) ? bytes($machine->{size_bytes}) : $size_of->{$base} // next;
        push @found, { volname => "$base/$name", vmid => $owner, size => $size, parent => $base };
    }
    my $wanted = $vollist && { map { $_ => 1 } @$vollist };
    my @listed;
    for my $volume (@found) {
        $volume->{volid}  = "$storeid:" . delete($volume->{volname});
        $volume->{format} = 'raw';
        next if $wanted ? !$wanted->{ $volume->{volid} } : defined($vmid) && $volume->{vmid} ne $vmid;
        push @listed, $volume;
    }
    return \@listed;
}

# The number in a disk's name. A VM has each number once: its files become templates of the same number.
my sub number_of ($name) {
    return $name =~ /-disk-([0-9]{1,4})\z/ ? int($1) : undef;
}

my sub taken_numbers ($class, $storeid, $scfg, $vmid) {
    return map { ($_ => 1) } grep { defined } map { number_of($_->{volid}) } @{ $class->list_images($storeid, $scfg, $vmid) };
}

# The first name that no volume of the VM has.
sub find_free_diskname ($class, $storeid, $scfg, $vmid, @) {
    my %taken = taken_numbers($class, $storeid, $scfg, $vmid);
    my ($free) = grep { !$taken{$_} } 0 .. MOST_VOLUMES - 1;
    die "VM $vmid has too many disks in '$storeid'\n" if !defined($free);
    return "vm-$vmid-disk-$free";
}

sub alloc_image ($class, $storeid, $scfg, $vmid, $format, $name = undef, $size = undef, @) {
    die "format '$format' is not supported: disks of Spillway are raw\n" if ($format // 'raw') ne 'raw';
    my $volume = parsed($name // $class->find_free_diskname($storeid, $scfg, $vmid));
    die "'$name' is not a name for a disk of VM $vmid\n" if $volume->{kind} ne 'file' || $volume->{vmid} ne $vmid;
    my ($kib, $part) = ($size // '') =~ /^([1-9][0-9]{0,11})(\.[0-9]+)?\z/ or die "the size of '$volume->{name}' is no number of KiB\n";
    if (defined(my $number = defined($name) ? number_of($volume->{name}) : undef)) {
        my %taken = taken_numbers($class, $storeid, $scfg, $vmid);
        die "VM $vmid has a disk $number in '$storeid' already: name another number than '$name', or none\n" if $taken{$number};
    }
    my $path = folder($storeid, $scfg) . "/$volume->{name}";
    sysopen(my $file, $path, O_CREAT | O_EXCL | O_RDWR, 0640) or die "$path: $!\n";
    if (!truncate($file, ($kib + ($part ? 1 : 0)) * 1024)) {
        my $why = $!;
        unlink($path);
        die "$path: $why\n";
    }
    return $volume->{name};
}

# Removes what there is of a template. With its catalog the daemon would remove the clones, too.
my sub remove_template ($storeid, $scfg, $name) {
    my $image = object($storeid, $name);
    die "'$name' is still in use by linked clones\n" if items(answer($scfg, 'machine', 'list', '--catalog', $image));
    spillway($scfg, ASK, 'catalog', 'delete', $image);
    spillway($scfg, RUN, 'image', 'delete', $image);
    return;
}

sub free_image ($class, $storeid, $scfg, $volname, @) {
    my $volume = parsed($volname);
    my $object = object($storeid, $volume->{name});
    if ($volume->{kind} eq 'template') {
        remove_template($storeid, $scfg, $volume->{name});
    } elsif ($volume->{kind} eq 'file') {
        my $path = $class->path($scfg, $volname, $storeid);
        unlink($path) || $!{ENOENT} || die "$path: $!\n";
    } else {
        forget($storeid, $scfg, $volume);
        spillway($scfg, RUN, 'machine', 'delete', $object);
    }
    return undef;
}

# "Convert to template". The file is the truth until the image and its catalog are there: what an attempt that broke off has left is
# made again.
sub create_base ($class, $storeid, $scfg, $volname, @) {
    my $volume = parsed($volname);
    die "'$volname' is a disposable disk: when VM $volume->{vmid} is off, it holds what its template holds, so it cannot become another"
        . " template. To change a template, make a full clone of it, change that, and convert it."
        . " VM $volume->{vmid} is marked as a template now: 'qm set $volume->{vmid} --template 0'\n"
        if $volume->{kind} eq 'clone';
    die "'$volname' cannot become a template\n" if $volume->{kind} ne 'file' || $volume->{name} !~ /^vm-($ID-$DISK)\z/;
    my $base  = "base-$1";
    my $image = object($storeid, $base);
    my $path  = $class->path($scfg, $volname, $storeid);
    die "volume '$storeid:$volname' does not exist\n" if !-f $path;
    remove_template($storeid, $scfg, $base);
    print "importing '$volname' as the image '$image'\n";
    spillway($scfg, IMPORT, 'image', 'import', $image, $path, '--format', 'raw') // die "$path cannot be read by spillwayd\n";
    my $number = existing_template($storeid, $scfg, $base)->{number};
    my @create = ('catalog', 'create', $image, '--image', "$image:$number", '--vmm', 'external', '--label', label($storeid));
    for my $setting (qw(ram overflow full)) {
        my $value = $scfg->{"spillway-$setting"} // next;
        $value =~ /^($SIZE|pause|fail)\z/ or die "storage '$storeid': spillway-$setting is not '$value'\n";
        push @create, "--$setting", $1;
    }
    spillway($scfg, ASK, @create) // die "the image '$image' is gone\n";
    unlink($path) or die "$path: $!\n";
    return $base;
}

sub clone_image ($class, $scfg, $storeid, $volname, $vmid, $snapname = undef, @) {
    die "disks of Spillway have no snapshots\n" if $snapname;
    my $volume = parsed($volname);
    die "'$volname' is not a template: convert its VM to a template first\n" if $volume->{kind} ne 'template';
    my $name = $class->find_free_diskname($storeid, $scfg, $vmid);
    my @names = (object($storeid, $volume->{name}), object($storeid, parsed($name)->{name}));
    existing($storeid, $volname, spillway($scfg, ASK, 'machine', 'add', @names));
    return "$volume->{name}/$name";
}

# Sizes

sub volume_size_info ($class, $scfg, $storeid, $volname, @) {
    my $volume = parsed($volname);
    my ($size, $used, $parent, $ctime);
    if ($volume->{kind} eq 'file') {
        my $path = $class->path($scfg, $volname, $storeid);
        my @stat = stat($path) or die "$path: $!\n";
        ($size, $used, $ctime) = ($stat[7], $stat[12] * 512, $stat[10]);
    } elsif ($volume->{kind} eq 'template') {
        $size = existing_template($storeid, $scfg, $volume->{name})->{size};
    } else {
        die "'$volname' $NO_BACKUP" if is_asked_by_backup();
        my $machine = existing($storeid, $volname, answer($scfg, 'machine', 'show', object($storeid, $volume->{name})));
        my $own = $machine->{size_bytes};
        $size   = defined($own) ? bytes($own) : existing_template($storeid, $scfg, $volume->{base})->{size};
        $parent = $volume->{base};
    }
    return wantarray ? ($size, 'raw', $used, $parent, $ctime) : $size;
}

sub volume_resize ($class, $scfg, $storeid, $volname, $size, $running = undef, $snapname = undef, @) {
    die "disks of Spillway have no snapshots\n" if $snapname;
    my $volume = parsed($volname);
    my $wanted = bytes($size);
    die "'$volname' is a template, and keeps its size\n" if $volume->{kind} eq 'template';
    if ($volume->{kind} eq 'file') {
        # QEMU does it itself.
        return 1 if $running;
        my $path = $class->path($scfg, $volname, $storeid);
        sysopen(my $file, $path, O_RDWR) or die "$path: $!\n";
        die "'$volname' does not shrink\n" if $wanted < -s $file;
        truncate($file, $wanted) or die "$path: $!\n";
        return undef;
    }
    die "'$volname' is a disposable disk, which grows while VM $volume->{vmid} is off: shut it down first\n" if $running;
    die "VM $volume->{vmid} is hibernated: what its disk holds would be gone\n" if is_hibernated($volume->{vmid});
    forget($storeid, $scfg, $volume);
    my $mebibytes = int(($wanted + MIB - 1) / MIB) . 'M';
    existing($storeid, $volname, spillway($scfg, ASK, 'machine', 'resize', object($storeid, $volume->{name}), $mebibytes));
    return undef;
}

# What is possible, and what is refused

sub volume_has_feature ($class, $scfg, $feature, $storeid, $volname, $snapname = undef, $running = undef, @) {
    return undef if $snapname;
    my $kind = parsed($volname)->{kind};
    # A clone that is off holds what its template holds. As a template it is refused in words, not passed over.
    my $features = {
        clone      => { template => 1 },
        copy       => { template => 1, file => 1, clone => $running },
        template   => { file     => 1, clone => 1 },
        sparseinit => { file     => 1 },
    };
    return $features->{$feature}->{$kind} ? 1 : undef;
}

my $SNAPSHOTS = "disks of Spillway have no snapshots: linked clones forget what they have written when they are turned off, and a template"
    . " is what they begin with\n";
my $MOVES = "disks of Spillway stay on their host: 'Move disk' or a full clone to another storage makes an ordinary disk of one\n";

sub volume_snapshot             { die $SNAPSHOTS; }
sub volume_snapshot_rollback    { die $SNAPSHOTS; }
sub volume_snapshot_delete      { die $SNAPSHOTS; }
sub volume_rollback_is_possible { die $SNAPSHOTS; }
sub rename_snapshot             { die $SNAPSHOTS; }
sub volume_snapshot_info        { return {}; }
sub volume_export               { die $MOVES; }
sub volume_import               { die $MOVES; }
sub volume_export_formats       { return (); }
sub volume_import_formats       { return (); }
sub rename_volume               { die "disks of Spillway do not change the VM that they belong to: clone the VM instead\n"; }

1;
