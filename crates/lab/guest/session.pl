# Sessions of office users: documents, a mail file, a browser's cache, archives, copied files. docs/design/044 says why so.
# All choices come from the seed by one generator a session, drawn in the same order whatever the time that things take.
use strict;
use warnings;
use Fcntl qw(:DEFAULT :seek);
our %word;

my $state;    # of the generator
my $session;  # 0, 1, 2...
my $home;
my $pool;     # what documents consist of
my @program;  # files of the image: what programs read, and what is copied
my (%document, $mail, @cache, $cached, $pages, $copied, $copies);

sub draw { # 0 .. n - 1
    use integer;
    $state = $state * 6364136223846793005 + 1442695040888963407;
    return (($state >> 33) & 0x3fffffff) % $_[0];
}

sub between { $_[0] + draw($_[1] - $_[0] + 1) }

# Half of it random, half text: a compressor has to work, and is of use.
sub make_pool {
    use integer;
    my ($s, @words) = ($word{seed} * 2862933555777941757 + 3037000493);
    for (1 .. 32768) {
        $s = $s * 6364136223846793005 + 1442695040888963407;
        push @words, pack('q', $s ^ ($s >> 29)) . 'the next';
    }
    $pool = join '', @words;
}

sub content {
    my $bytes = shift;
    my $from = draw(length($pool) - 65536);
    my $text = substr $pool, $from, $bytes < 65536 ? $bytes : 65536;
    $text .= substr $pool, draw(length($pool) - 65536), 65536 while length $text < $bytes;
    return substr $text, 0, $bytes;
}

sub put { # handle, where, content
    my ($file, $at, $text) = @_;
    sysseek $file, $at, SEEK_SET or die "seek: $!";
    (syswrite($file, $text) // -1) == length $text or die "write: $!";
}

sub create { # path, content, fsync
    sysopen my $file, $_[0], O_WRONLY | O_CREAT | O_TRUNC or die "$_[0]: $!";
    put($file, 0, $_[1]);
    if ($_[2]) { $file->sync or die "$_[0]: fsync: $!" }
    close $file or die "$_[0]: $!";
}

# What is closed leaves the page cache: programs fill a real desktop's memory, and the next reader reads the disk.
sub forget {
    sysopen my $file, $_[0], O_RDONLY or die "$_[0]: $!";
    syscall 221, fileno $file, 0, 0, 4; # fadvise64, POSIX_FADV_DONTNEED
}

sub get {
    sysopen my $file, $_[0], O_RDONLY or die "$_[0]: $!";
    my $n = 0;
    while (my $read = sysread $file, my $text, 262144) { $n += $read }
    return $n;
}

# Programs are read from the image: some megabytes of it.
sub start_program { get($program[draw(scalar @program)]) for 1 .. $_[0] }

sub logon {
    mkdir $home or die "$home: $!";
    mkdir "$home/$_" or die "$_: $!" for qw(profile documents cache copied);
    my $left = $word{profile_mb} << 20;
    if ($left) {
        start_program(12);
        my $hive = int($left / 5);
        create("$home/profile/hive", content($hive), 1);
        $left -= $hive;
        for (my $n = 0; $left > 0; $n++) {
            my $bytes = between(1024, 49152);
            create("$home/profile/$n", content($bytes < $left ? $bytes : $left), 0);
            $left -= $bytes;
        }
    }
    if ($word{mail_mb}) {
        sysopen $mail, "$home/mail", O_RDWR | O_CREAT or die "$home/mail: $!";
        truncate $mail, $word{mail_mb} << 20 or die "$home/mail: $!";
    }
}

# A document is copied from where documents are shared when it is first needed, and read from then on.
sub document {
    my $path = "$home/documents/" . draw(int($word{documents_mb} * 4 / 3));
    if ($document{$path}) {
        get($path);
    } else {
        $document{$path} = between(65536, 1441792); # 0.72 MiB on average
        create($path, content($document{$path}), 1);
    }
    forget($path);
    return $path;
}

sub open_document { start_program(2); document() }

# Typing, and now and then what a program puts aside for the case that it dies.
sub edit {
    sysopen my $file, "$home/documents/recovery", O_WRONLY | O_CREAT or die "recovery: $!";
    put($file, draw(256) * 4096, content(between(1, 4) * 4096)) for 1 .. between(2, 6);
}

# As office programs do: all of it into a new file, which takes the old one's place when it is safe.
sub save {
    my @all = sort keys %document;
    my $path = @all ? $all[draw(scalar @all)] : document();
    create("$path.new", content($document{$path}), 1);
    rename "$path.new", $path or die "$path: $!";
    forget($path);
}

sub to_mail { # bytes
    put($mail, draw(($word{mail_mb} << 8) - 16) * 4096, content($_[0]));
    put($mail, 0, content(4096));
    $mail->sync or die "mail: fsync: $!";
}

sub mail {
    for (1 .. 4) {
        sysseek $mail, draw($word{mail_mb} << 8) * 4096, SEEK_SET;
        sysread $mail, my $text, 8192;
    }
    put($mail, draw(($word{mail_mb} << 8) - 4) * 4096, content(between(1, 4) * 4096)) for 1 .. 5;
    to_mail(8192);
    forget("$home/mail");
}

# Four documents in an archive, which is mailed and deleted.
sub compress {
    my @paths = map { document() } 1 .. 4;
    system("cat @paths | gzip -9 >$home/archive") == 0 or die 'gzip failed';
    open my $file, '<', "$home/archive" or die "archive: $!";
    $file->sync or die "archive: fsync: $!";
    sysread $file, my $text, 60000;
    to_mail(length $text) if $mail;
    unlink "$home/archive" or die "archive: $!";
}

# A page: small files, some of earlier ones again, the oldest deleted when there are too many; and the history.
sub browse {
    for (1 .. between(15, 45)) {
        my $bytes = between(1024, 49152);
        my $path = sprintf '%s/cache/%d', $home, $pages++;
        create($path, content($bytes), 0);
        push @cache, [$path, $bytes];
        $cached += $bytes;
    }
    get($cache[draw(scalar @cache)][0]) for 1 .. 10;
    while ($cached > $word{cache_mb} << 20) {
        my ($path, $bytes) = @{ shift @cache };
        unlink $path or die "$path: $!";
        $cached -= $bytes;
    }
    sysopen my $file, "$home/history", O_WRONLY | O_CREAT or die "history: $!";
    put($file, draw(256) * 4096, content(4096)) for 1 .. 2;
    $file->sync or die "history: fsync: $!";
}

# Files of the image, until so many bytes have been copied in all.
sub copy {
    my $until = shift;
    while ($copied < $until) {
        my $from = $program[$copies++ % @program];
        sysopen my $in, $from, O_RDONLY or die "$from: $!";
        sysopen my $out, "$home/copied/$copies", O_WRONLY | O_CREAT or die "$copies: $!";
        while ($copied < $until and my $read = sysread $in, my $text, 262144) {
            (syswrite($out, $text) // -1) == $read or die "copy: $!";
            $copied += $read;
        }
    }
}

sub timed {
    my ($name, $action) = @_;
    my $begin = now();
    $action->();
    report('{"action":"%s","session":%d,"at":%.6f,"took_ms":%.3f}', $name, $session, $begin, (now() - $begin) * 1000);
}

# What users do, how often of 125 times, after how many seconds of reading or typing.
my @kinds = (
    ['open', 10, 10, 30, \&open_document, 'documents_mb'],
    ['edit', 31, 5, 20, \&edit, 'documents_mb'],
    ['save', 35, 5, 20, \&save, 'documents_mb'],
    ['mail', 25, 5, 20, \&mail, 'mail_mb'],
    ['browse', 16, 10, 30, \&browse, 'cache_mb'],
    ['compress', 8, 10, 30, \&compress, 'documents_mb'],
);

sub session {
    $session = shift;
    $state = $word{seed} + ($session << 32);
    draw(2) for 1 .. 8;
    ($home, $cached, $pages, $copied, $copies) = ("/home/user$session", 0, 0, 0, 0);
    my @of = map { my $kind = $_; ($kind) x $kind->[1] } grep { $word{ $_->[5] } } @kinds;
    if (@of) { timed('logon', \&logon) } else { logon() }
    for my $n (1 .. $word{actions}) {
        my $kind = @of ? $of[draw(scalar @of)] : ['', 0, 5, 20];
        select undef, undef, undef, between($kind->[2] * 1000, $kind->[3] * 1000) / 1000 / $word{pace};
        timed($kind->[0], $kind->[4]) if @of;
        my $until = int(($word{file_copy_mb} << 20) * $n / $word{actions});
        timed('copy', sub { copy($until) }) if $until > $copied;
    }
}

sub prepare {
    make_pool();
    @program = sort grep { -f && !-l } split /\n/, `find /usr/bin /usr/lib -xdev -type f -size +64k -size -8192k`;
    @program > 100 or die 'the image has too few files';
}

sub work {
    my $begin = now();
    my @children;
    for my $n (0 .. $word{sessions} - 1) {
        my $child = fork // die "fork: $!";
        if (!$child) {
            my $pause = $begin + $n * $word{logon_every_s} - now();
            select undef, undef, undef, $pause if $pause > 0;
            session($n);
            exit 0;
        }
        push @children, $child;
    }
    for (@children) {
        waitpid $_, 0;
        $? == 0 or exit 1; # it has said why
    }
}

1;
