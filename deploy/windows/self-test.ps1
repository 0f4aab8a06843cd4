# Says how Windows finds itself as a machine of Spillway: docs/how-to/windows.md. Run it as an administrator in the guest, and report
# what it prints. It changes nothing but one file on C:, which it deletes, and asks Windows to discard unused blocks of C:.
#
# Each line begins with ok, BAD or note. A test that fails by itself is a line too.
$ErrorActionPreference = 'Stop'
$label = 'Temporary Storage'
$cloudbase = 'C:\Program Files\Cloudbase Solutions\Cloudbase-Init'

function Write-Line([string]$Kind, [string]$What, [string]$Found) {
    Write-Output ('{0,-4} {1}: {2}' -f $Kind, $What, $Found)
}

function Test-That([string]$What, [scriptblock]$Test) {
    try {
        $result = & $Test
        if ($result.Ok) { $kind = 'ok' } else { $kind = 'BAD' }
        Write-Line $kind $What $result.Found
    } catch {
        Write-Line 'BAD' $What $_.Exception.Message
    }
}

function Show-That([string]$What, [scriptblock]$Value) {
    try {
        Write-Line 'note' $What ([string](& $Value))
    } catch {
        Write-Line 'note' $What $_.Exception.Message
    }
}

Show-That 'Windows' {
    $system = Get-CimInstance Win32_OperatingSystem
    '{0}, build {1}' -f $system.Caption, $system.BuildNumber
}

foreach ($driver in 'viostor', 'netkvm') {
    Test-That "driver $driver" {
        $found = Get-CimInstance Win32_SystemDriver -Filter "Name='$driver'"
        $version = (Get-Item "$env:SystemRoot\System32\drivers\$driver.sys").VersionInfo.FileVersion
        @{ Ok = $found.State -eq 'Running'; Found = "$($found.State), start $($found.StartMode), version $version" }
    }
}

Test-That 'disk of C: is of viostor' {
    $disk = Get-Partition -DriveLetter C | Get-Disk
    $id = $disk.Path -replace '^\\\\\?\\', '' -replace '#\{.*$', '' -replace '#', '\'
    $service = (Get-PnpDevice -InstanceId $id | Get-PnpDeviceProperty -KeyName DEVPKEY_Device_Parent).Data
    $driver = (Get-PnpDeviceProperty -InstanceId $service -KeyName DEVPKEY_Device_Service).Data
    @{ Ok = $driver -eq 'viostor'; Found = "$($disk.FriendlyName), $driver, sectors of $($disk.LogicalSectorSize)" }
}

Test-That 'discards are on' {
    $found = (& "$env:SystemRoot\System32\fsutil.exe" behavior query DisableDeleteNotify) -join '; '
    @{ Ok = $found -match 'NTFS DisableDeleteNotify = 0'; Found = $found }
}

Test-That 'C: can be discarded' {
    # What 'spillway machine stats NAME' counts as discards grows by about 256 MiB.
    $path = 'C:\spillway-self-test.tmp'
    $block = New-Object byte[] 1048576
    (New-Object Random).NextBytes($block)
    $file = [IO.File]::Create($path)
    try { foreach ($i in 1..256) { $file.Write($block, 0, $block.Length) }; $file.Flush($true) } finally { $file.Close() }
    Remove-Item $path
    $said = Optimize-Volume -DriveLetter C -ReTrim -Verbose 4>&1
    @{ Ok = $true; Found = (($said | Select-Object -Last 3) -join ' ') }
}

Test-That "volume '$label'" {
    $volume = Get-Volume -FileSystemLabel $label
    $disk = Get-Partition -DriveLetter $volume.DriveLetter | Get-Disk
    $found = "$($volume.DriveLetter):, $($volume.FileSystem), $($volume.HealthStatus), $($disk.PartitionStyle)"
    @{ Ok = $volume.FileSystem -eq 'NTFS' -and $volume.HealthStatus -eq 'Healthy'; Found = $found }
}

Test-That 'page file is there and nowhere else' {
    $letter = (Get-Volume -FileSystemLabel $label).DriveLetter
    $files = @(Get-CimInstance Win32_PageFileUsage)
    $outside = @($files | Where-Object { -not $_.Name.StartsWith("${letter}:") })
    $found = ($files | ForEach-Object { "$($_.Name) $($_.AllocatedBaseSize) MiB" }) -join ', '
    @{ Ok = $files.Count -gt 0 -and $outside.Count -eq 0; Found = $found }
}

Test-That 'cloudbase-init is done' {
    $log = Get-Content "$cloudbase\log\cloudbase-init.log"
    $errors = @($log | Where-Object { $_ -match ' ERROR ' })
    $restarts = @($log | Where-Object { $_ -match '\] Rebooting' }).Count
    $done = @($log | Where-Object { $_ -match 'Plugins execution done' }).Count
    @{ Ok = $done -gt 0; Found = "$restarts restarts, $($errors.Count) errors; last: $($errors | Select-Object -Last 1)" }
}

Test-That 'name is the machine''s' {
    $log = Get-Content "$cloudbase\log\cloudbase-init.log"
    $set = $log | Select-String 'Setting hostname: (\S+)' | Select-Object -Last 1
    $name = $set.Matches[0].Groups[1].Value
    @{ Ok = $env:COMPUTERNAME -eq $name; Found = "$env:COMPUTERNAME, cloudbase-init: $name" }
}

Show-That 'member of a domain' { (Get-CimInstance Win32_ComputerSystem).PartOfDomain }
Show-That 'SID of the machine' {
    # Clones of an image that was not generalised last have the same one.
    (Get-LocalUser | Select-Object -First 1).SID.AccountDomainSid.Value
}
Show-That 'activation, as Windows has it' {
    $filter = "PartialProductKey IS NOT NULL AND ApplicationID = '55c92734-d682-4d71-983e-d6ec3f16059f'"
    Get-CimInstance SoftwareLicensingProduct -Filter $filter |
        ForEach-Object { "$($_.Name), status $($_.LicenseStatus), $($_.GracePeriodRemaining) minutes left" }
}
Show-That 'licensing in the configuration of cloudbase-init' {
    $found = Select-String -Path "$cloudbase\conf\cloudbase-init.conf" -Pattern '^[^#]*(licensing|activate_windows|product_key)'
    if ($found) { 'it is there: it may touch the activation' } else { 'none: the activation is not touched' }
}
Show-That 'Secure Boot' { Confirm-SecureBootUEFI }
Show-That 'TPM' { $tpm = Get-Tpm; "present $($tpm.TpmPresent), ready $($tpm.TpmReady)" }
Show-That 'guest agent' { (Get-Service QEMU-GA).Status }
Show-That 'time since the start' { ((Get-Date) - (Get-CimInstance Win32_OperatingSystem).LastBootUpTime).ToString() }
